"""The kernel of MoeInitRoutingV3, and its definition to test it against."""

from __future__ import annotations

import torch

from moe_graph.ops.defs.init_routing.int8_rounding import dynamic_int8, static_int8
from moe_graph.ops.defs.init_routing.moe_init_routing_v3_shapes import (
    CUMSUM,
    DROP_PAD,
    DYNAMIC,
    GATHER,
    KEY_VALUE,
    NO_QUANT,
    STATIC,
    expert_range,
)
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.defs.support.poison import poison_, poisoned
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Call, Tensors

_LAST = torch.iinfo(torch.int32).max


def _require_values(op: Call) -> None:
    if op.quant_mode not in (NO_QUANT, STATIC, DYNAMIC):
        raise op.error(
            "quant_mode",
            got=op.quant_mode,
            want="-1, 0 or 1: the values of other modes are not computed here",
            hint="shapes and dtypes of every mode are, by moe_graph.infer_shape and in compilation",
        )
    if op.scale is not None and op.scale.dim() == 3:
        raise op.error("scale", got="3 dimensions", want="1 dimension: no values of MX inputs here")


def compute(op: Call) -> Tensors:
    """Compute the outputs of a checked call."""
    _require_values(op)
    start, end = expert_range(op)
    ids = op.expert_idx.reshape(-1)
    here = (ids >= start) & (ids < end)
    order = torch.argsort(torch.where(here, ids, _LAST), stable=True)
    counts = torch.bincount(ids[here] - start, minlength=end - start)
    order = order[: int(counts.sum())]
    per_expert = _token_counts(op, counts)
    if op.drop_pad_mode == DROP_PAD:
        return _drop_pad(op, ids, order, counts, per_expert)

    row_idx = _row_idx(op, ids, order)
    copies = ids.shape[0]
    rows = min(op.active_num, copies) if op.active_num > 0 else copies
    expanded, scales = _expand(op, order[:rows], ids, rows)
    return [expanded, row_idx, per_expert, scales]


def _row_idx(op: Call, ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    if op.row_idx_type != GATHER:
        row_idx = poisoned(ids.shape, torch.int32, ids.device)
        row_idx[: order.shape[0]] = order
        return row_idx
    row_idx = torch.full_like(ids, -1)
    return row_idx.scatter_(
        0, order, torch.arange(order.shape[0], dtype=torch.int32, device=ids.device)
    )


def _token_counts(op: Call, counts: torch.Tensor) -> torch.Tensor | None:
    if not op.expert_tokens_num_flag:
        return None
    if op.expert_tokens_num_type == CUMSUM:
        return counts.cumsum(0)
    if op.expert_tokens_num_type != KEY_VALUE:
        return counts
    pairs = poisoned((op.expert_num, 2), torch.int64, counts.device)
    (hit,) = counts.nonzero(as_tuple=True)
    pairs[: hit.shape[0] + 1] = 0
    pairs[: hit.shape[0], 0] = hit + expert_range(op)[0]
    pairs[: hit.shape[0], 1] = counts[hit]
    return pairs


def _expand(
    op: Call, order: torch.Tensor, ids: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of the copies in `order`, unwritten rows after them, and their scales."""
    hidden = op.x.shape[1]
    filled = order.shape[0]
    source = torch.div(order, max(op.expert_idx.shape[1], 1), rounding_mode="floor")
    dtype = op.x.dtype if op.quant_mode == NO_QUANT else torch.int8
    expanded = op.new_output((rows, hidden), dtype, op.x.device)
    poison_(expanded[filled:])
    scales = None if op.quant_mode == STATIC else poisoned((rows,), torch.float32, op.x.device)
    if op.quant_mode == NO_QUANT:
        gather_rows(op.x, source, expanded[:filled])
        if op.scale is not None and scales is not None:
            scales[:filled] = op.scale[source]
        return expanded, scales

    smooth_rows = _smooth_rows(op, ids, order)

    def quantise(chunk: slice) -> None:
        values = op.x.index_select(0, source[chunk])
        if scales is None:
            expanded[chunk] = static_int8(values, op.scale, op.offset)
            return
        smooth = None if smooth_rows is None else op.scale[smooth_rows[chunk]]
        expanded[chunk], scales[chunk] = dynamic_int8(values, smooth)

    run_parts(quantise, row_chunks(filled, hidden))
    return expanded, scales


def _smooth_rows(op: Call, ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
    """Return, for dynamic quantisation, the row of `scale` that smooths each copy in `order`."""
    if op.quant_mode != DYNAMIC or op.scale is None:
        return None
    if op.scale.shape[0] == 1:
        return torch.zeros_like(order)
    return ids[order] - expert_range(op)[0]


def _drop_pad(
    op: Call,
    ids: torch.Tensor,
    order: torch.Tensor,
    counts: torch.Tensor,
    per_expert: torch.Tensor | None,
) -> Tensors:
    capacity, hidden = op.expert_capacity, op.x.shape[1]
    sorted_ids = ids[order].to(torch.int64)
    first_row = counts.cumsum(0) - counts
    rank = torch.arange(order.shape[0], device=ids.device) - first_row[sorted_ids]
    kept = rank < capacity
    slots = (sorted_ids * capacity + rank)[kept]
    row_idx = torch.full_like(ids, -1).scatter_(0, order[kept], slots.to(torch.int32))

    rows, row_scales = _expand(op, order[kept], ids, slots.shape[0])
    expanded = rows.new_zeros((op.expert_num * capacity, hidden)).index_copy_(0, slots, rows)
    scales = None
    if row_scales is not None:
        scales = poisoned((op.expert_num * capacity,), torch.float32, ids.device)
        scales[slots] = row_scales
    return [expanded.view(op.expert_num, capacity, hidden), row_idx, per_expert, scales]


def naive(op: Call) -> Tensors:
    """Compute the outputs as the definition reads."""
    _require_values(op)
    start, end = expert_range(op)
    ids = op.expert_idx.reshape(-1).tolist()
    top_k, hidden = op.expert_idx.shape[1], op.x.shape[1]
    drop_pad = op.drop_pad_mode == DROP_PAD
    here = [copy for copy in range(len(ids)) if start <= ids[copy] < end]
    order = sorted(here, key=lambda copy: ids[copy])
    dtype = op.x.dtype if op.quant_mode == NO_QUANT else torch.int8
    if drop_pad:
        expanded = torch.zeros((op.expert_num * op.expert_capacity, hidden), dtype=dtype)
    else:
        rows = min(op.active_num, len(ids)) if op.active_num > 0 else len(ids)
        expanded = poisoned((rows, hidden), dtype, op.x.device)
    scales = poisoned((expanded.shape[0],), torch.float32, op.x.device)
    gathers = op.row_idx_type == GATHER
    row_idx = poisoned((len(ids),), torch.int32, op.x.device)
    if gathers:
        row_idx.fill_(-1)

    seen: dict[int, int] = {}
    for place, copy in enumerate(order):
        expert = ids[copy]
        rank = seen.get(expert, 0)
        seen[expert] = rank + 1
        row = expert * op.expert_capacity + rank if drop_pad else place
        if drop_pad and rank >= op.expert_capacity:
            continue
        if gathers:
            row_idx[copy] = row
        else:
            row_idx[place] = copy
        if row < expanded.shape[0]:
            expanded[row] = _naive_row(op, copy // top_k, expert - start, scales, row)
    if drop_pad:
        expanded = expanded.view(op.expert_num, op.expert_capacity, hidden)
    counts = [ids.count(expert) for expert in range(start, end)]
    return [
        expanded,
        row_idx,
        _naive_counts(op, counts) if op.expert_tokens_num_flag else None,
        None if op.quant_mode == STATIC else scales,
    ]


def _naive_row(op: Call, token: int, expert: int, scales: torch.Tensor, row: int) -> torch.Tensor:
    x: torch.Tensor = op.x[token]
    if op.quant_mode == NO_QUANT:
        if op.scale is not None:
            scales[row] = op.scale[token]
        return x
    if op.quant_mode == STATIC:
        scaled = x.float() * op.scale[0] + op.offset[0]
        return torch.clamp(torch.nan_to_num(torch.round(scaled), 0.0), -128, 127).to(torch.int8)
    smoothed = x.float()
    if op.scale is not None:
        smoothed = smoothed * op.scale[expert if op.scale.shape[0] > 1 else 0]
    scales[row] = smoothed.abs().max() / 127 if x.numel() else 0.0
    steps = torch.nan_to_num(torch.round(smoothed / scales[row]), 0.0)
    return torch.clamp(steps, -128, 127).to(torch.int8)


def _naive_counts(op: Call, counts: list[int]) -> torch.Tensor:
    if op.expert_tokens_num_type == CUMSUM:
        return torch.tensor([sum(counts[: at + 1]) for at in range(len(counts))])
    if op.expert_tokens_num_type != KEY_VALUE:
        return torch.tensor(counts)
    start = expert_range(op)[0]
    pairs = [(start + at, count) for at, count in enumerate(counts) if count]
    table = poisoned((op.expert_num, 2), torch.int64, op.x.device)
    for row, pair in enumerate([*pairs, (0, 0)][: op.expert_num]):
        table[row] = torch.tensor(pair)
    return table
