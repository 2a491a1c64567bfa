"""Whatever one changes in a router, the passes keep its results: right, or not at all."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import torch

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from tests.passes.mutations import change, with_examples
from tests.passes.routers import EXPERTS, HIDDEN, LOWERED, RoutedMoe
from tests.passes.test_mutations import run

ROUTERS = ["by-methods", "clamped", "scattered", "sigmoid-bias", "deepseek-v3", "deepseek-official"]


def captured(name: str) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return the dynamo graph of a layer and its inputs."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.append((copy.deepcopy(gm), [t.detach().clone() for t in inputs]))
        return gm.forward

    module = RoutedMoe(LOWERED[name][1])
    args = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*args)
    gm, inputs = found[0]
    for node in gm.graph.nodes:
        if node.kwargs.get("sorted") is False:
            # A sum over tokens would depend on an order that nobody has promised.
            node.update_kwarg("sorted", True)
    gm.recompile()
    return gm, inputs


def test_changed_router_computes_the_same_after_the_passes() -> None:
    outcomes: Counter[str] = Counter()
    for name in ROUTERS:
        gm, inputs = captured(name)
        assert with_examples(gm, inputs)
        for seed in range(60):
            changed = copy.deepcopy(gm)
            nodes = list(changed.graph.nodes)
            sort = next(i for i, node in enumerate(nodes) if node.name.startswith("sort"))
            described = change(random.Random(seed), nodes[:sort])
            changed.recompile()
            expected = run(changed, inputs) if described else None
            if expected is None or not expected.isfinite().all():
                continue
            if not with_examples(changed, inputs):
                continue
            for layer in rewrite_moe_layers(changed, Config()):
                outcomes[layer.router_op or layer.router_reasons[0].check] += 1
            result = run(changed, inputs)
            assert result is not None, described
            torch.testing.assert_close(
                result, expected, rtol=1e-4, atol=1e-5, msg=lambda m, c=described: f"{c}\n{m}"
            )
    assert outcomes["MoeGatingTopK"] > 20
    assert {"router-weights", "router-groups"} <= outcomes.keys()
