"""Whatever one changes in a layer, the passes keep its results: right, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from tests.passes.handwritten import (
    COMBINES,
    COUNTS,
    DISPATCHES,
    HIDDEN,
    SORTS,
    TOKENS,
    HandwrittenMoe,
)
from tests.passes.mutations import mutations, with_examples


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """Makes a graph that reads memory which nothing wrote give NaN, always."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


LAYERS: list[dict[str, Any]] = [
    {},
    {"sort": SORTS["sort-stable"], "combine": COMBINES["in-place"]},
    {"sort": SORTS["argsort"], "dispatch": DISPATCHES["repeat_interleave"]},
    {"counts": COUNTS["one_hot-2d"], "combine": COMBINES["bmm"]},
    {"counts": COUNTS["scatter_add"], "combine": COMBINES["scatter_add"]},
    {"dispatch": DISPATCHES["gather"], "combine": COMBINES["put-back"]},
]


def captured(module: torch.nn.Module, x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """Return the dynamo graph of a module and its inputs."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.append((copy.deepcopy(gm), [t.detach().clone() for t in inputs]))
        return gm.forward

    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
    return found[0]


def run(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Run a graph on copies of its inputs; None where it cannot run."""
    try:
        with torch.no_grad():
            return gm(*[x.clone() for x in inputs])[0]
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("pieces", LAYERS, ids=range(len(LAYERS)))
@pytest.mark.parametrize("seed", range(2))
def test_changed_layer_computes_the_same_after_the_passes(
    pieces: dict[str, Any], seed: int
) -> None:
    gm, inputs = captured(HandwrittenMoe(**pieces), torch.randn(TOKENS, HIDDEN))
    assert with_examples(gm, inputs)
    statuses: list[str] = []
    for change, changed in mutations(gm, 60, seed):
        expected = run(changed, inputs)
        if expected is None or not expected.isfinite().all() or not with_examples(changed, inputs):
            continue
        statuses += [layer.status for layer in rewrite_moe_layers(changed, Config())]
        result = run(changed, inputs)
        assert result is not None, change
        torch.testing.assert_close(
            result, expected, rtol=1e-4, atol=1e-5, msg=lambda m, c=change: f"{c}\n{m}"
        )
    assert "kept" in statuses
    assert "rewritten" in statuses
