"""The fused ops of one layer, as the rewrites emit them.

::

    rows, row_idx, ends, _ = moe_graph.moe_init_routing_v2(x, ids, expert_num=E, ...)
    h = moe_graph.grouped_matmul_single(rows, w, bias, ends, ...)
    out = moe_graph.moe_finalize_routing_v2(h, row_idx, scales=weights, drop_pad_mode=2, k=K)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

import moe_graph.ops  # noqa: F401  registers the torch ops
from moe_graph.passes import meta
from moe_graph.passes.combine_weights import Weights
from moe_graph.passes.emit import Emitter
from moe_graph.passes.endings import Ending
from moe_graph.passes.facts import Root

_ops = torch.ops.moe_graph
_CUMSUM = 1
_ROW_ORDER_NO_DROP = 2
_ONE_RESULT = 3  # split_item

MAX_LIST = 128
"""Largest number of matrices that GroupedMatmul takes as a list."""


class FusedOps:
    """Emits the ops of one layer, which share one routing.

    Args:
        emit: makes the nodes.
        root: the expert ids.
        experts: number of experts of the weights.
        at: the first node that anything is inserted before.
    """

    def __init__(self, emit: Emitter, root: Root, experts: int, *, at: Node) -> None:
        self._emit, self._root, self._experts = emit, root, experts
        self._routings: dict[Node, Node] = {}
        ids = root.ids
        if len(meta.shape(ids)) != 2:
            ids = emit.reshape(ids, (-1, root.top_k), at=at)
        self._ids = emit.cast(ids, torch.int32, at=at)

    def rows_of(self, tokens: Node, *, at: Node) -> Node:
        """Return the rows of `tokens`, grouped by expert."""
        first = not self._routings
        if tokens not in self._routings:
            self._routings[tokens] = self._route(tokens, self._ids, at=at)
        routing = self._routings[tokens]
        rows = self._emit.item(routing, 0, at=at, name="expanded_x")
        if first:
            self._row_idx = self._emit.item(routing, 1, at=at, name="expanded_row_idx")
            ends = self._emit.item(routing, 2, at=at, name="expert_tokens_cumsum")
            self._ends = self._emit.cast(ends, torch.int64, at=at)
        return rows

    def of_experts(self, table: Node, *, at: Node) -> Node:
        """Return the values of a table ``[T, E]`` at the experts of each token, ``[T, K]``."""
        ids = self._emit.cast(self._ids, torch.int64, at=at)
        gather = torch.ops.aten.gather.default
        return self._emit.call(gather, (table, 1, ids), at=at, name=f"{table.name}_of_experts")

    def values_by_row(self, values: Node, widths: tuple[meta.Dim, ...], *, at: Node) -> Node:
        """Bring values ``[T * K, *widths]`` or ``[T, K, *widths]`` into the order of the rows.

        It is a routing with one slot per token; the result is ``[T * K, prod(widths)]``.
        """
        table = self._emit.with_widths(values, (meta.product(widths),), at=at)
        slots = self._emit.reshape(self._ids, (-1, 1), at=at)
        routing = self._route(table, slots, at=at)
        return self._emit.item(routing, 0, at=at, name=f"{values.name}_by_row")

    def ids_by_row(self, like: Node, *, at: Node) -> Node:
        """Bring the ids into the order of the rows, in the shape and dtype of `like`."""
        slots = self._emit.reshape(self._ids, (-1, 1), at=at)
        # fp32 holds every id below 2**24.
        values = self._emit.cast(slots, torch.float32, at=at)
        routing = self._route(values, slots, at=at)
        rows = self._emit.item(routing, 0, at=at, name="expert_idx_by_row")
        shaped = self._emit.reshape(rows, (-1, *meta.shape(like)[1:]), at=at)
        return self._emit.cast(shaped, meta.dtype(like), at=at)

    def _route(self, x: Node, ids: Node, *, at: Node) -> Node:
        settings = {
            "expert_num": self._experts,
            "expert_tokens_count_or_cumsum_flag": _CUMSUM,
        }
        op = _ops.moe_init_routing_v2.default
        return self._emit.call(op, (x, ids), settings, at=at, name="moe_init_routing")

    def product(
        self, rows: Node, weight: Node, bias: Node | None, transposed: bool, *, at: Node
    ) -> Node:
        """Multiply each row with the matrix of its expert, out of ``[E, ., .]``."""
        width = meta.shape(weight)[2 if transposed else 1]
        rows = self._emit.with_widths(rows, (width,), at=at)
        if bias is not None:
            bias = self._bias(bias, rows, at=at)
        return self._emit.call(
            _ops.grouped_matmul_single.default,
            (rows, weight, bias, self._ends),
            {"transpose_weight": True} if transposed else {},
            at=at,
            name="grouped_matmul",
        )

    def product_of_list(
        self,
        rows: Node,
        weights: Sequence[Node],
        biases: Sequence[Node],
        transposed: bool,
        *,
        at: Node,
    ) -> Node:
        """Multiply each row with the matrix of its expert, out of a list.

        The op takes a list of up to :data:`MAX_LIST`; more are stacked, one copy of them a step.
        """
        if len(weights) > MAX_LIST:
            stacked = [
                self._emit.call(torch.ops.aten.stack.default, (list(part),), at=at, name="stacked")
                for part in (weights, biases)
                if part
            ]
            return self.product(rows, stacked[0], (*stacked, None)[1], transposed, at=at)
        width = meta.shape(weights[0])[1 if transposed else 0]
        rows = self._emit.with_widths(rows, (width,), at=at)
        products = self._emit.call(
            _ops.grouped_matmul.default,
            (
                [rows],
                list(weights),
                [self._bias(bias, rows, at=at) for bias in biases],
                *([],) * 4,
                self._ends,
            ),
            {"split_item": _ONE_RESULT, "transpose_weight": transposed, "group_type": 0},
            at=at,
            name="grouped_matmul",
        )
        return self._emit.item(products, 0, at=at, name="grouped_product")

    def _bias(self, bias: Node, rows: Node, *, at: Node) -> Node:
        """Return a bias in the dtype that the product takes it in.

        That is fp32 beside bf16 rows, with one rounding after the addition.
        """
        wide = meta.dtype(rows) is torch.bfloat16
        return self._emit.cast(bias, torch.float32, at=at) if wide else bias

    def combine(
        self,
        rows: Node,
        weights: Weights | None,
        ending: Ending,
    ) -> Node:
        """Sum the rows of each token times its weights, as the end of the layer does."""
        at, like = ending.end, ending.result
        emit, top_k = self._emit, self._root.top_k
        scales = None
        if weights is not None:
            scales = self.of_experts(weights.node, at=at) if weights.by_expert else weights.node
            scales = emit.cast(scales, weights.dtype, at=at)
        kind = _finalize_dtype(rows, scales, like)
        if scales is not None:
            if len(meta.shape(scales)) != 2 or meta.shape(scales)[1] != top_k:
                scales = emit.reshape(scales, (-1, top_k), at=at)
            if not _mixes(kind, meta.dtype(scales)):
                scales = emit.cast(scales, kind, at=at)
        rows = emit.with_widths(rows, meta.shape(rows)[-1:], at=at)
        rows = emit.cast(rows, kind, at=at)
        settings = {"scales": scales, "drop_pad_mode": _ROW_ORDER_NO_DROP, "k": top_k}
        if ending.base is not None:
            base = emit.with_widths(ending.base, meta.shape(ending.base)[-1:], at=at)
            settings["x1"] = emit.cast(base, kind, at=at)
        final = emit.call(
            _ops.moe_finalize_routing_v2.default,
            (rows, self._row_idx),
            settings,
            at=at,
            name="moe_finalize_routing",
        )
        final = emit.cast(final, meta.dtype(like), at=at)
        if len(meta.shape(like)) != 2:
            final = emit.reshape(final, (-1, *meta.shape(like)[1:]), at=at)
        return final


def _mixes(rows: torch.dtype, scales: torch.dtype) -> bool:
    """Tell whether MoeFinalizeRoutingV2 takes these dtypes together on every product."""
    return rows == scales or (rows is torch.bfloat16 and scales is torch.float32)


def _finalize_dtype(rows: Node, weights: Node | None, result: Node) -> torch.dtype:
    """Return the dtype of the rows that are combined.

    It is the dtype of the result when that keeps the precision of the source: bf16 rows are summed
    in fp32 and rounded once. fp16 rows are summed in fp16 on A2 and A3, so they go through fp32.
    """
    kinds = [meta.dtype(rows), meta.dtype(result)]
    mixes = weights is None or _mixes(kinds[0], meta.dtype(weights))
    if mixes and kinds[0] == kinds[1] and kinds[0] in (torch.bfloat16, torch.float32):
        return kinds[0]
    kind = torch.promote_types(*kinds)
    if weights is not None:
        kind = torch.promote_types(kind, meta.dtype(weights))
    return kind if kind is torch.bfloat16 else torch.float32
