"""One body on grouped rows in place of E bodies, one per expert.

Before::

    y_0 = linear(silu(linear(rows_0, w1_0)), w2_0);  y_1 = linear(silu(linear(rows_1, w1_1)), w2_1)

After::

    h = moe_graph.grouped_matmul(rows, [w1_0, w1_1], ends, transpose_weight=True)
    y = moe_graph.grouped_matmul(silu(h), [w2_0, w2_1], ends, transpose_weight=True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Emitter
from moe_graph.passes.fused import FusedOps
from moe_graph.passes.gates import swiglu_input
from moe_graph.passes.loops import ADDED_BIAS, Loop
from moe_graph.passes.stacks import Stack, stack_of

_ops = torch.ops.moe_graph


class GroupedBody:
    """Emits the body of a loop once, on the rows of all experts.

    Args:
        facts: what is known about the old nodes.
        emit: makes the nodes.
        fused: the routing of the layer.
        at: node that all new ones are inserted before.
    """

    def __init__(self, facts: Facts, emit: Emitter, fused: FusedOps, at: Node) -> None:
        self._facts, self._emit, self._fused, self._at = facts, emit, fused, at

    def make(self, loop: Loop, leaf: Callable[[Node], Node | None]) -> Node:
        """Return the rows of all experts.

        `leaf` gives the grouped value that takes the place of a leaf of the body of expert 0, and
        None for any other node.
        """
        grouped: dict[Node, Node] = {}
        for node in loop.body:
            grouped[node] = leaf(node) or self._node(loop, node, grouped)
        copies = [grouped[node] for node in loop.body if self._is_pure(node)]
        self._emit.drop_unused(grouped[loop.rows], copies)
        return grouped[loop.rows]

    def _node(self, loop: Loop, node: Node, grouped: dict[Node, Node]) -> Node:
        call = self._facts.calls[node]
        if call.op == ADDED_BIAS[0] and (node, "other") in loop.parameters:
            return grouped[call["input"]]  # the product has it
        weights = loop.parameters.get((node, "weight")) or loop.parameters.get((node, "other"))
        if weights is not None:
            biases = loop.parameters.get((node, "bias")) or self._added_bias(loop, node)
            if biases is None and call.get("bias") is not None:
                biases = stack_of(self._facts, [call["bias"]] * loop.experts)
            return self._product(grouped[call["input"]], weights, biases, call.op == "linear")
        source = swiglu_input(self._facts, node)
        if source is not None and source in grouped:
            swiglu = _ops.swi_glu.default
            return self._emit.call(swiglu, (grouped[source], -1), at=self._at, name="swi_glu")
        return self._emit.copy(node, lambda old: grouped.get(old, old), at=self._at)

    def _added_bias(self, loop: Loop, product: Node) -> Stack | None:
        """Return what a call adds to a product as its bias."""
        adds = (user for user in product.users if self._facts.calls[user].op == ADDED_BIAS[0])
        return next(
            (loop.parameters[n, "other"] for n in adds if (n, "other") in loop.parameters), None
        )

    def _is_pure(self, node: Node) -> bool:
        calls = self._facts.calls
        return all(calls[n].writes is None for n in self._facts.memory.sharing(node))

    def _product(self, rows: Node, weights: Stack, biases: Stack | None, linear: bool) -> Node:
        transposed = linear != weights.transposed
        if weights.table is None:
            parts = biases.parts if biases is not None else []
            return self._fused.product_of_list(rows, weights.parts, parts, transposed, at=self._at)
        bias = self._stacked(biases) if biases is not None else None
        return self._fused.product(rows, weights.table, bias, transposed, at=self._at)

    def _stacked(self, biases: Stack) -> Node:
        """Return the biases of all experts as one tensor."""
        if biases.table is not None:
            return biases.table
        args: Any = (list(biases.parts),)
        return self._emit.call(torch.ops.aten.stack.default, args, at=self._at, name="bias")
