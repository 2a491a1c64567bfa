"""Put fused routing ops in place of a recognised layer.

Before::

    sort = torch.sort(ids.view(-1));  perm = sort[1]
    offs = histc(sort[0].float(), E, 0, E - 1).cumsum(0)
    rows = x[perm // K]
    h = body(grouped_mm(rows, w1.transpose(-2, -1), offs))
    y = grouped_mm(h, w2.transpose(-2, -1), offs) * weights.view(-1)[perm][:, None]
    out = y[inverse].view(T, K, H).sum(1).to(x.dtype)

After::

    rows, row_idx, ends, _ = moe_graph.moe_init_routing_v2(x, ids.to(int32), expert_num=E, ...)
    h = body(moe_graph.grouped_matmul_single(rows, w1, None, ends, transpose_weight=True))
    y = moe_graph.grouped_matmul_single(h, w2, None, ends, transpose_weight=True)
    out = moe_graph.moe_finalize_routing_v2(y, row_idx, scales=weights, drop_pad_mode=2, k=K)

Every new node is made before any old one is touched, so a layer that an op refuses stays as it was.
The rows are in stable order by expert from here on, whatever the sort of the source did with ties.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

import moe_graph.ops  # noqa: F401  registers the torch ops
from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Emitter, Results
from moe_graph.passes.facts import PerSlot, Rows
from moe_graph.passes.layer import Layer
from moe_graph.passes.products import Product

_ops = torch.ops.moe_graph
_CUMSUM = 1
_ROW_ORDER_NO_DROP = 2


class LayerRewrite:
    """The rewrite of one layer.

    Args:
        graph: graph of the layer.
        facts: what is known about its nodes.
        layer: what to replace.
        path: module path of the layer.
        results: example values that are known from other layers.

    Attributes:
        replacements: old node -> new node.
        nodes: the new nodes, in the order of their making.
    """

    def __init__(
        self, graph: Graph, facts: Facts, layer: Layer, path: str, results: Results
    ) -> None:
        self._graph = graph
        self._facts = facts
        self._layer = layer
        self._emit = Emitter(graph, path, results)
        self._routings: dict[Node, Node] = {}
        self.replacements: dict[Node, Node] = {}
        self._operands: dict[Node, Node] = {}

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
            self._make_nodes()
        except Exception:
            self._emit.undo()
            raise

    def apply(self) -> None:
        """Use the new nodes in place of the old ones, and erase what fell away."""
        for old, new in self.replacements.items():
            old.replace_all_uses_with(new)
        for node in self._layer.body:
            for old, new in self._operands.items():
                node.replace_input_with(old, new)
            self._emit.mark(node)
        for node in reversed(self._graph.nodes):
            if node in self._layer.dead:
                self._graph.erase_node(node)

    def _make_nodes(self) -> None:
        layer = self._layer
        products = [product.node for product in layer.products if product.of_tokens]
        values = [self._first_reader(node) for node in (*layer.slot_values, *layer.ids)]
        first = min(
            [*layer.dispatches, *layer.per_slot, *products, *values],
            key=self._facts.position.__getitem__,
        )
        self._ids = self._emit.cast(self._ids_by_token(first), torch.int32, at=first)
        for node in layer.dispatches:
            self._dispatch(node)
        for node in layer.per_slot:
            self.replacements[node] = self._values_by_row(node, at=node)
        for node in layer.slot_values:
            self._operands[node] = self._values_by_row(node, at=self._first_reader(node))
        for node in layer.ids:
            self._operands[node] = self._ids_by_row(node, at=self._first_reader(node))
        for product in layer.products:
            self._product(product)
        for node, source in layer.gates.items():
            gated = self._emit.call(_ops.swi_glu.default, (source, -1), at=node, name="swi_glu")
            self.replacements[node] = gated
        self._combine(layer.end)

    def _ids_by_token(self, at: Node) -> Node:
        """Return the ids as ``[T, K]``."""
        ids, top_k = self._layer.root.ids, self._layer.root.top_k
        if len(meta.shape(ids)) == 2:
            return ids
        return self._emit.reshape(ids, (-1, top_k), at=at)

    def _dispatch(self, node: Node) -> None:
        rows = self._facts.given[node]
        assert isinstance(rows, Rows)
        self.replacements[node] = self._rows_of(rows.source, at=node)

    def _rows_of(self, tokens: Node, *, at: Node) -> Node:
        """Return the rows of `tokens`, grouped by expert."""
        first = not self._routings
        if tokens not in self._routings:
            self._routings[tokens] = self._route(tokens, self._ids, at=at)
        routing = self._routings[tokens]
        if first:
            self._row_idx = self._emit.item(routing, 1, at=at, name="expanded_row_idx")
            ends = self._emit.item(routing, 2, at=at, name="expert_tokens_cumsum")
            self._ends = self._emit.cast(ends, torch.int64, at=at)
        return self._emit.item(routing, 0, at=at, name="expanded_x")

    def _first_reader(self, value: Node) -> Node:
        """Return the first node of the body that reads `value`."""
        readers = (user for user in value.users if user in self._layer.body)
        return min(readers, key=self._facts.position.__getitem__)

    def _route(self, x: Node, ids: Node, *, at: Node) -> Node:
        settings = {
            "expert_num": self._layer.experts,
            "expert_tokens_count_or_cumsum_flag": _CUMSUM,
        }
        op = _ops.moe_init_routing_v2.default
        return self._emit.call(op, (x, ids), settings, at=at, name="moe_init_routing")

    def _values_by_row(self, node: Node, *, at: Node) -> Node:
        """Bring one value per slot into the order of the rows: a routing with one slot a token."""
        fact = self._facts.given[node]
        assert isinstance(fact, PerSlot)
        dims = meta.shape(fact.source)
        widths = dims[fact.order.row_dims(dims) :]
        values = self._emit.with_widths(fact.source, (meta.product(widths),), at=at)
        slots = self._emit.reshape(self._ids, (-1, 1), at=at)
        rows = self._emit.item(
            self._route(values, slots, at=at), 0, at=at, name=f"{node.name}_by_row"
        )
        return self._emit.with_widths(rows, meta.shape(node)[1:], at=at)

    def _ids_by_row(self, node: Node, *, at: Node) -> Node:
        """Bring the ids into the order of the rows; fp32 holds every id below 2**24."""
        slots = self._emit.reshape(self._ids, (-1, 1), at=at)
        values = self._emit.cast(slots, torch.float32, at=at)
        rows = self._emit.item(
            self._route(values, slots, at=at), 0, at=at, name="expert_idx_by_row"
        )
        shaped = self._emit.reshape(rows, (-1, *meta.shape(node)[1:]), at=at)
        return self._emit.cast(shaped, meta.dtype(node), at=at)

    def _product(self, product: Product) -> None:
        at, rows = product.node, product.rows
        if product.of_tokens:
            rows = self._rows_of(rows, at=at)
        width = meta.shape(product.weight)[2 if product.transposed else 1]
        rows = self._emit.with_widths(rows, (width,), at=at)
        bias = product.bias
        if bias is not None and meta.dtype(rows) is torch.bfloat16:
            # The product takes an fp32 bias with bf16 rows, and rounds once after the addition.
            bias = self._emit.cast(bias, torch.float32, at=at)
        new = self._emit.call(
            _ops.grouped_matmul_single.default,
            (rows, product.weight, bias, self._ends),
            {"transpose_weight": True} if product.transposed else {},
            at=at,
            name="grouped_matmul",
        )
        new = self._emit.with_widths(new, meta.shape(product.result)[1:], at=at)
        self.replacements[product.result] = new
        if product.biased is not None:
            self.replacements[product.biased] = new

    def _combine(self, end: Node) -> None:
        rows, scales = self._layer.rows, self._layer.weights
        if scales is not None and self._layer.weight_dtype is not None:
            scales = self._emit.cast(scales, self._layer.weight_dtype, at=end)
        kind = _finalize_dtype(rows, scales, end)
        if scales is not None:
            if len(meta.shape(scales)) != 2 or meta.shape(scales)[1] != self._layer.root.top_k:
                scales = self._emit.reshape(scales, (-1, self._layer.root.top_k), at=end)
            if not _mixes(kind, meta.dtype(scales)):
                scales = self._emit.cast(scales, kind, at=end)
        rows = self._emit.with_widths(rows, meta.shape(rows)[-1:], at=end)
        rows = self._emit.cast(rows, kind, at=end)
        final = self._emit.call(
            _ops.moe_finalize_routing_v2.default,
            (rows, self._row_idx),
            {"scales": scales, "drop_pad_mode": _ROW_ORDER_NO_DROP, "k": self._layer.root.top_k},
            at=end,
            name="moe_finalize_routing",
        )
        final = self._emit.cast(final, meta.dtype(end), at=end)
        if len(meta.shape(end)) != 2:
            final = self._emit.reshape(final, (-1, *meta.shape(end)[1:]), at=end)
        self.replacements[end] = final


def _mixes(rows: torch.dtype, scales: torch.dtype) -> bool:
    """Tell whether MoeFinalizeRoutingV2 takes these dtypes together on every product."""
    return rows == scales or (rows is torch.bfloat16 and scales is torch.float32)


def _finalize_dtype(rows: Node, weights: Node | None, end: Node) -> torch.dtype:
    """Return the dtype of the rows that are combined.

    It is the dtype of the result when that keeps the precision of the source: bf16 rows are summed
    in fp32 and rounded once. fp16 rows are summed in fp16 on A2 and A3, so they go through fp32.
    """
    kinds = [meta.dtype(rows), meta.dtype(end)]
    mixes = weights is None or _mixes(kinds[0], meta.dtype(weights))
    if mixes and kinds[0] == kinds[1] and kinds[0] in (torch.bfloat16, torch.float32):
        return kinds[0]
    kind = torch.promote_types(*kinds)
    if weights is not None:
        kind = torch.promote_types(kind, meta.dtype(weights))
    return kind if kind is torch.bfloat16 else torch.float32
