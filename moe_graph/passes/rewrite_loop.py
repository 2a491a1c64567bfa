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

from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Results
from moe_graph.passes.facts import PerSlot, Rows
from moe_graph.passes.fused import FusedOps
from moe_graph.passes.grouped_body import GroupedBody
from moe_graph.passes.loop_layer import LoopLayer
from moe_graph.passes.rewriting import Rewrite


class LoopRewrite(Rewrite):
    """The rewrite of one loop over experts."""

    def __init__(
        self, graph: Graph, facts: Facts, layer: LoopLayer, path: str, results: Results
    ) -> None:
        super().__init__(graph, facts, layer, path, results)
        self._layer = layer

    def _make_nodes(self) -> None:
        """Emit the body of expert 0 on the rows of all experts, and the sum."""
        layer, end = self._layer, self._layer.end
        self._fused = FusedOps(self._emit, layer.root, layer.experts, at=end)
        body = GroupedBody(self._facts, self._emit, self._fused, end)
        rows = body.make(layer.loop, self._leaf)
        self.replacements[end] = self._fused.combine(rows, layer.weights, layer.ending)

    def _leaf(self, node: Node) -> Node | None:
        """Return the grouped value of a leaf of the body, None for any other node."""
        fact, end = self._facts.given[node], self._layer.end
        if isinstance(fact, Rows):
            return self._fused.rows_of(fact.source, at=end)
        if not isinstance(fact, PerSlot):
            return None
        widths, source = meta.shape(node)[1:], fact.source
        if fact.by_expert:
            source = self._fused.of_experts(source, at=end)
        values = self._fused.values_by_row(source, widths, at=end)
        return self._emit.with_widths(values, widths, at=end)
