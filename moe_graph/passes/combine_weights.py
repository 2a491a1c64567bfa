"""The weights of a combine, as the source holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.facts import Contribution


@dataclass(frozen=True, eq=False)
class Weights:
    """What multiplies the rows of the experts in the combine.

    Attributes:
        node: one weight per slot, in slot order and of any shape.
        dtype: dtype that they take before they multiply the rows.
        by_expert: `node` is ``[T, E]`` instead.
    """

    node: Node
    dtype: torch.dtype
    by_expert: bool = False


def weights_of(facts: Facts, share: Contribution, end: Node) -> Weights | None:
    """Return the weights of a contribution as node `end` may read them, None for a plain sum.

    They are taken from behind the reshape that flattened them, where that is safe.
    """
    weights = share.weights
    if weights is None:
        return None
    kind = share.weight_dtype or meta.dtype(weights)
    call, root = facts.calls[weights], share.body.root
    if not share.weights_by_expert and call.op == "reshape" and call.writes is None:
        table = call["input"]
        span = facts.position[weights], facts.position[end]
        by_token = meta.same_shape(meta.shape(table), (root.tokens, root.top_k))
        if by_token and facts.memory.written_between(table, *span) is None:
            weights = table
    return Weights(weights, kind, share.weights_by_expert)
