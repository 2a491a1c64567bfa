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

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Results
from moe_graph.passes.facts import Part, PerSlot, Rows
from moe_graph.passes.fused import FusedOps
from moe_graph.passes.grouped_body import GroupedBody
from moe_graph.passes.layer import Layer
from moe_graph.passes.products import Product
from moe_graph.passes.rewriting import Rewrite

_ops = torch.ops.moe_graph


class LayerRewrite(Rewrite):
    """The rewrite of one sorted or gathered layer."""

    def __init__(
        self, graph: Graph, facts: Facts, layer: Layer, path: str, results: Results
    ) -> None:
        super().__init__(graph, facts, layer, path, results)
        self._layer = layer

    def _make_nodes(self) -> None:
        layer = self._layer
        of_tokens = [product.node for product in layer.products if product.of_tokens]
        values = [self._first_reader(node) for node in (*layer.slot_values, *layer.ids)]
        first = min(
            [*layer.dispatches, *layer.per_slot, *of_tokens, *values],
            key=self._facts.position.__getitem__,
        )
        self._fused = FusedOps(self._emit, layer.root, layer.experts, at=first)
        for node in layer.slot_values:
            self._operands[node] = self._values_by_row(node, at=self._first_reader(node))
        for node in layer.ids:
            self._operands[node] = self._fused.ids_by_row(node, at=self._first_reader(node))
        made = [*layer.dispatches, *layer.per_slot, *layer.folds, *layer.gates]
        products = {product.node: product for product in layer.products}
        for node in sorted({*made, *products, *layer.body}, key=self._facts.position.__getitem__):
            if node in products:
                self._product(products[node])
            elif node in made:
                self.replacements[node] = self._value(node)
            elif self._is_stale(node):
                self._emit.refresh(node, self._current)
        self.replacements[layer.end] = self._fused.combine(
            self._current(layer.rows), layer.weights, layer.ending
        )

    def _value(self, node: Node) -> Node:
        """Return what takes the place of a dispatch, a gather, a gate or a loop."""
        fact, layer = self._facts.given[node], self._layer
        if node in layer.folds:
            body = GroupedBody(self._facts, self._emit, self._fused, node)
            return body.make(layer.folds[node], self._whole)
        if node in layer.gates:
            halves = (self._current(layer.gates[node]), -1)
            return self._emit.call(_ops.swi_glu.default, halves, at=node, name="swi_glu")
        if isinstance(fact, Rows):
            return self._fused.rows_of(fact.source, at=node)
        return self._values_by_row(node, at=node)

    def _whole(self, node: Node) -> Node | None:
        """Return the rows of all experts for the part of one, None for any other node."""
        fact = self._facts.given[node]
        return self._current(fact.source) if isinstance(fact, Part) else None

    def _current(self, node: Node) -> Node:
        """Return the new node in place of `node`, or `node` itself."""
        return self.replacements.get(node, node)

    def _is_stale(self, node: Node) -> bool:
        """Tell whether the shape of a node that stays follows from one that is another now."""

        def changed(source: Node) -> bool:
            new = self._current(source)
            if new is source or not meta.is_tensor(source):
                return self._emit.was_refreshed(source)
            return not meta.same_shape(meta.shape(new), meta.shape(source))

        return any(map(changed, node.all_input_nodes))

    def _first_reader(self, value: Node) -> Node:
        """Return the first node of the body that reads `value`."""
        readers = (user for user in value.users if user in self._layer.body)
        return min(readers, key=self._facts.position.__getitem__)

    def _values_by_row(self, node: Node, *, at: Node) -> Node:
        fact = self._facts.given[node]
        assert isinstance(fact, PerSlot)
        source = fact.source
        if fact.by_expert:
            source, widths = self._fused.of_experts(source, at=at), meta.shape(node)[1:]
        else:
            dims = meta.shape(source)
            widths = dims[fact.order.row_dims(dims) :]
        rows = self._fused.values_by_row(source, widths, at=at)
        return self._emit.with_widths(rows, meta.shape(node)[1:], at=at)

    def _product(self, product: Product) -> None:
        at, rows = product.node, self._current(product.rows)
        if product.of_tokens:
            rows = self._fused.rows_of(rows, at=at)
        new = self._fused.product(rows, product.weight, product.bias, product.transposed, at=at)
        new = self._emit.with_widths(new, meta.shape(product.result)[1:], at=at)
        self.replacements[product.result] = new
        if product.biased is not None:
            self.replacements[product.biased] = new
