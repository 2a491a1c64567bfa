"""Put one grouped body in place of a loop over experts.

Before, for every expert ``e``::

    token, k = torch.where(ids == e)
    h = body(linear(x[token], w1[e]))
    out.index_add_(0, token, linear(h, w2[e]) * weights[token, k, None])

After::

    rows, row_idx, ends, _ = moe_graph.moe_init_routing_v2(x, ids.to(int32), expert_num=E, ...)
    h = body(moe_graph.grouped_matmul_single(rows, w1, None, ends, transpose_weight=True))
    y = moe_graph.grouped_matmul_single(h, w2, None, ends, transpose_weight=True)
    out = moe_graph.moe_finalize_routing_v2(y, row_idx, scales=weights, drop_pad_mode=2, k=K)

Weights that are modules of their own go into the product as a list, and are not copied. The sum of
a token is over its K experts in their order in `ids`, where the loop adds in the order of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Emitter, Results
from moe_graph.passes.facts import PerSlot, Rows
from moe_graph.passes.fused import FusedOps
from moe_graph.passes.gates import swiglu_input
from moe_graph.passes.loop_layer import LoopLayer
from moe_graph.passes.stacks import Stack, stack_of

_ops = torch.ops.moe_graph


class LoopRewrite:
    """The rewrite of one loop; see :class:`moe_graph.passes.rewrite.LayerRewrite`."""

    def __init__(
        self, graph: Graph, facts: Facts, layer: LoopLayer, path: str, results: Results
    ) -> None:
        self._graph = graph
        self._facts = facts
        self._layer = layer
        self._emit = Emitter(graph, path, results)
        self.replacements: dict[Node, Node] = {}

    @property
    def nodes(self) -> list[Node]:
        """The new nodes, in the order of their making."""
        return self._emit.nodes

    def prepare(self) -> None:
        """Make the new nodes beside the old ones.

        Raises:
            moe_graph.ops.OpError: an op refuses its arguments; the graph is as it was.
        """
        try:
            self.replacements[self._layer.end] = self._grouped()
        except Exception:
            self._emit.undo()
            raise

    def apply(self) -> None:
        """Use the sum in place of the old one, and erase the loop."""
        layer = self._layer
        layer.ending.serve(self.replacements[layer.end])
        for node in reversed(self._graph.nodes):
            if node in layer.dead:
                self._graph.erase_node(node)

    def _grouped(self) -> Node:
        """Emit the body of expert 0 on the rows of all experts, and the sum; return the sum."""
        layer, loop, end = self._layer, self._layer.loop, self._layer.end
        self._fused = FusedOps(self._emit, layer.root, layer.experts, at=end)
        grouped: dict[Node, Node] = {}
        for node in loop.body:
            fact = self._facts.given[node]
            if isinstance(fact, Rows):
                grouped[node] = self._fused.rows_of(fact.source, at=end)
            elif isinstance(fact, PerSlot):
                widths = meta.shape(node)[1:]
                source = fact.source
                if fact.by_expert:
                    source = self._fused.of_experts(source, at=end)
                values = self._fused.values_by_row(source, widths, at=end)
                grouped[node] = self._emit.with_widths(values, widths, at=end)
            else:
                grouped[node] = self._body_node(node, grouped)
        rows = grouped[loop.unrolled.rows]
        self._emit.drop_unused(rows, [grouped[node] for node in loop.body if self._is_pure(node)])
        return self._fused.combine(rows, layer.weights, layer.ending)

    def _body_node(self, node: Node, grouped: dict[Node, Node]) -> Node:
        loop, call = self._layer.loop, self._facts.calls[node]
        weights = loop.parameters.get((node, "weight")) or loop.parameters.get((node, "other"))
        if weights is not None:
            biases = loop.parameters.get((node, "bias"))
            if biases is None and call.get("bias") is not None:
                biases = stack_of(self._facts, [call["bias"]] * loop.experts)
            return self._product(grouped[call["input"]], weights, biases, call.op == "linear")
        source = swiglu_input(self._facts, node)
        if source is not None and source in grouped:
            swiglu = _ops.swi_glu.default
            return self._emit.call(
                swiglu, (grouped[source], -1), at=self._layer.end, name="swi_glu"
            )
        return self._emit.copy(node, lambda old: grouped.get(old, old), at=self._layer.end)

    def _is_pure(self, node: Node) -> bool:
        calls = self._facts.calls
        return all(calls[n].writes is None for n in self._facts.memory.sharing(node))

    def _product(self, rows: Node, weights: Stack, biases: Stack | None, linear: bool) -> Node:
        end, transposed = self._layer.end, linear != weights.transposed
        if weights.table is None:
            parts = biases.parts if biases is not None else []
            return self._fused.product_of_list(rows, weights.parts, parts, transposed, at=end)
        bias = self._stacked(biases) if biases is not None else None
        return self._fused.product(rows, weights.table, bias, transposed, at=end)

    def _stacked(self, biases: Stack) -> Node:
        """Return the biases of all experts as one tensor."""
        if biases.table is not None:
            return biases.table
        args: Any = (list(biases.parts),)
        return self._emit.call(torch.ops.aten.stack.default, args, at=self._layer.end, name="bias")
