"""Compute the chosen experts alone where the source computes all of them.

Before::

    rows = x.repeat(E, 1) * gates.t().reshape(-1, 1)
    h = body(bmm(rows.view(E, T, H), w1))
    out = bmm(h, w2).sum(0)

After::

    rows, row_idx, ends, _ = moe_graph.moe_init_routing_v2(x, ids.to(int32), expert_num=E, ...)
    rows = rows * gates_by_row
    h = body(moe_graph.grouped_matmul_single(rows, w1, None, ends))
    y = moe_graph.grouped_matmul_single(h, w2, None, ends)
    out = moe_graph.moe_finalize_routing_v2(y, row_idx, drop_pad_mode=2, k=K)

What the other experts compute is multiplied by zero in the source. It counts there if it is
infinite or not a number, and not here.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.combine_weights import Weights
from moe_graph.passes.dense_layer import DenseLayer
from moe_graph.passes.emit import Results
from moe_graph.passes.fused import FusedOps
from moe_graph.passes.rewriting import Rewrite
from moe_graph.passes.side_facts import Dense


class DenseRewrite(Rewrite):
    """The rewrite of one layer of all experts on all tokens."""

    def __init__(
        self, graph: Graph, facts: Facts, layer: DenseLayer, path: str, results: Results
    ) -> None:
        super().__init__(graph, facts, layer, path, results)
        self._layer = layer

    def _make_nodes(self) -> None:
        layer, end = self._layer, self._layer.ending.end
        self._fused = FusedOps(self._emit, layer.root, layer.experts, at=end)
        grouped: dict[Node, Node] = {}
        for node in layer.steps:
            grouped[node] = self._step(node, grouped)
        gates = layer.weights
        weights = Weights(gates.table, meta.dtype(gates.table), True) if gates is not None else None
        total = self._fused.combine(grouped[layer.rows], weights, layer.ending)
        self.replacements[end] = total

    def _step(self, node: Node, grouped: dict[Node, Node]) -> Node:
        layer, end, call = self._layer, self._layer.ending.end, self._facts.calls[node]
        if node in layer.products:
            rows, weight, transposed = layer.products[node]
            source = grouped[rows] if rows is not None else self._tokens()
            return self._fused.product(source, weight, None, transposed, at=end)
        if call.op == "repeat":
            return self._tokens()
        inner = [source for source in node.all_input_nodes if source in grouped]
        if call.op == "reshape" and self._keeps_widths(node, inner[0]):
            return grouped[inner[0]]
        if call.op == "mul" and len(inner) < len(set(node.all_input_nodes)):
            return self._gated(node, grouped[inner[0]])
        return self._emit.copy(node, lambda old: grouped.get(old, old), at=end)

    def _tokens(self) -> Node:
        return self._fused.rows_of(self._layer.tokens, at=self._layer.ending.end)

    def _keeps_widths(self, node: Node, source: Node) -> bool:
        """Tell whether a reshape is about tokens and experts alone, which rows do not have."""
        widths = []
        for value in (source, node):
            fact = self._facts.given[value]
            assert isinstance(fact, Dense)
            widths.append(meta.shape(value)[len(fact.axes) :])
        return meta.same_shape(*widths)

    def _gated(self, node: Node, rows: Node) -> Node:
        """Multiply the rows by their gates, unless the sum does that."""
        layer, end = self._layer, self._layer.ending.end
        fact = self._facts.given[node]
        assert isinstance(fact, Dense)
        if fact.weights is not None or layer.gates is None:
            return rows
        table = self._fused.of_experts(layer.gates.table, at=end)
        gates = self._fused.values_by_row(table, (), at=end)
        gates = self._emit.with_widths(gates, (1,), at=end)
        product = torch.ops.aten.mul.Tensor
        gated = self._emit.call(product, (rows, gates), at=end, name=f"{node.name}_grouped")
        return self._emit.cast(gated, meta.dtype(node), at=end)
