"""Run a lowered router against the nodes that it replaces, on random logits.

Used with ``Config(verify=True)``, as :mod:`moe_graph.passes.verify` is for layers. The logits are
drawn with all scores apart, with one expert that every token wants, and with many of them equal.
Of equal scores the source may choose any, so the choice is compared by the scores of what is
chosen, and the weights where both chose the same experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moe_graph.passes import meta
from moe_graph.passes.router_plan import Plan
from moe_graph.passes.router_region import computed_from
from moe_graph.passes.router_rewrite import RouterRewrite
from moe_graph.passes.router_values import Values
from moe_graph.passes.verify import (
    TOLERANCE,
    boundary,
    concrete,
    copies,
    extract,
    structure,
)


class RouterVerifier:
    """Checks the routers of one graph module; routers of equal structure are run once."""

    def __init__(self, owner: GraphModule, values: Values) -> None:
        self._owner = owner
        self._values = values
        self._found: dict[Hashable, tuple[float, float] | None] = {}

    def check(self, plan: Plan, rewrite: RouterRewrite) -> tuple[float, float] | None:
        """Run the op and what it replaces, both of which are in the graph.

        Returns:
            Largest difference and the limit that it exceeds, None where they agree. The difference
            is infinite where the source could not have chosen these experts.
        """
        graph, selection = self._owner.graph, plan.selection
        operands = {n for n in (plan.logits, plan.bias) if n is not None}
        old_results = (selection.ranked.node, selection.ids, *plan.weights)
        members = computed_from(self._values, list(old_results), operands)
        old_nodes = [n for n in graph.nodes if n in members]
        new_nodes = [n for n in graph.nodes if n in set(rewrite.nodes)]
        inputs = list(dict.fromkeys((*boundary(old_nodes), *boundary(new_nodes))))
        key = structure([*old_nodes, *new_nodes], inputs)
        if key in self._found:
            return self._found[key]
        new_results = (rewrite.expert_idx, *rewrite.weights.values())
        old = extract(self._owner, old_nodes, inputs, old_results)
        new = extract(self._owner, new_nodes, inputs, new_results)
        kinds = [meta.dtype(n) for n in plan.weights]
        limit = max((TOLERANCE.get(kind, 1e-5) for kind in kinds), default=1e-5)
        self._found[key] = None
        for drawn in _draws(inputs, plan):
            with torch.no_grad():
                ranked, *expected = old(*copies(drawn))
                result = new(*copies(drawn))
            error = _difference(ranked, expected, result)
            if not error <= limit:
                self._found[key] = error, limit
                break
        return self._found[key]


def _draws(inputs: list[Node], plan: Plan) -> Iterator[list[Any]]:
    """Yield values for the inputs; the logits apart, tied, and with one expert above all.

    Of equal groups any may take part, and then nothing of the choice is comparable.
    """
    kinds = ["apart", "one expert"] + (["tied"] if plan.selection.groups is None else [])
    for kind in kinds:
        generator = torch.Generator().manual_seed(0)
        drawn: list[Any] = []
        for node in inputs:
            value = meta.example(node)
            if not isinstance(value, Tensor):
                drawn.append(concrete(value))
                continue
            numbers = torch.randn([concrete(dim) for dim in value.shape], generator=generator)
            if node is not plan.logits:
                numbers = numbers * 0.1
            elif kind == "tied":
                numbers = numbers.round()
            elif kind == "one expert":
                numbers[..., numbers.shape[-1] // 2] = 20.0
            drawn.append(numbers.to(value.device, value.dtype))
        yield drawn


def _difference(ranked: Tensor, expected: list[Tensor], result: tuple[Tensor, ...]) -> float:
    """Return the largest difference, infinity where the choice itself is not one of the source."""
    if not ranked.numel():
        return 0.0
    old_ids, new_ids = expected[0].long(), result[0].long()
    rank = ranked.float()
    old_scores = rank.gather(-1, old_ids).sort(-1, descending=True).values
    new_scores = rank.gather(-1, new_ids)
    old_order, new_order = old_ids.argsort(-1), new_ids.argsort(-1)
    old_sorted, new_sorted = old_ids.gather(-1, old_order), new_ids.gather(-1, new_order)
    distinct = bool((new_sorted.diff(dim=-1) > 0).all())
    if not distinct or not torch.allclose(old_scores, new_scores, rtol=1e-5, atol=1e-6):
        return float("inf")
    same = (old_sorted == new_sorted).all(-1)
    errors = [
        (old.float().gather(-1, old_order) - new.float().gather(-1, new_order))[same].abs()
        / old.float().abs().max().clamp(min=1.0)
        for old, new in zip(expected[1:], result[1:], strict=True)
    ]
    return max((error.max().item() for error in errors if error.numel()), default=0.0)
