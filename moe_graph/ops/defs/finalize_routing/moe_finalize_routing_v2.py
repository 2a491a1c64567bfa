"""MoeFinalizeRoutingV2: bring the experts' rows back to token order and add them up.

``y[i] = x1[i] + x2[i] + sum over k of scales[i, k] * (expanded_x[row(i, k)] + bias[e(i, k)])``,
where ``e(i, k) = expert_idx[i, k]``.

``drop_pad_mode`` says how ``expanded_row_idx`` lists the rows and whether some are dropped:

| mode | row(i, k)          | expanded_x  | dropped copies   |
|------|--------------------|-------------|------------------|
| 0    | ``idx[k * T + i]`` | ``[T*K, H]``| none             |
| 1    | ``idx[k * T + i]`` | ``[E, C, H]``| index -1, skipped |
| 2    | ``idx[i * K + k]`` | ``[T*K, H]``| none             |
| 3    | ``idx[i * K + k]`` | ``[E, C, H]``| index -1, skipped |

Products and sums are taken one after the other, k ascending, in fp32 with one final rounding;
fp16 is summed in fp16 on A2 and A3. Without ``scales`` every weight is 1 and K is the attribute k.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.finalize_routing.moe_finalize_routing_v2_autograd import (
    AUTOGRAD,
    has_drops,
    is_row_major,
)
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import UNKNOWN, UNKNOWN_RANK, floordiv, is_unknown, mul
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Input,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register

_NO_RANGE = (-1, -1)
_RANGES = ("zero_expert_range", "copy_expert_range", "constant_expert_range")


def _shapes(op: Call) -> Specs:
    op.expect_one_of("drop_pad_mode", (0, 1, 2, 3))
    ranks = {"expanded_x": 3 if has_drops(op.drop_pad_mode) else 2, "expanded_row_idx": 1}
    ranks |= dict.fromkeys(("x1", "x2", "bias", "scales", "expert_idx"), 2)
    present = {name: rank for name, rank in ranks.items() if getattr(op, name) is not None}
    dims = {name: op.dims(name, rank) for name, rank in present.items()}
    dtype = op.expanded_x.dtype
    if not all(getattr(op, name).rank_known for name in present):
        return [TensorSpec(UNKNOWN_RANK, dtype)]
    if any(is_unknown(dim) for shape in dims.values() for dim in shape):
        return [TensorSpec((UNKNOWN, UNKNOWN), dtype)]

    (copies,) = dims["expanded_row_idx"]
    hidden = dims["expanded_x"][-1]
    tokens = dims["scales"][0] if "scales" in dims else floordiv(copies, max(op.k, 1))
    for name in ("x1", "x2", "scales", "expert_idx"):
        if name in dims:
            op.expect_equal(name, dims[name][0], tokens, "dim 0")
    for name in ("x1", "x2", "bias"):
        if name in dims:
            op.expect_equal(name, dims[name][1], hidden, "dim 1")
    if "scales" in dims and "expert_idx" in dims:
        op.expect_equal("expert_idx", dims["expert_idx"][1], dims["scales"][1], "dim 1")
    if not has_drops(op.drop_pad_mode):
        op.expect_equal("expanded_row_idx", copies, dims["expanded_x"][0], "dim 0")
    if op.k > 1 and "scales" in dims:
        op.expect_equal("scales", dims["scales"][1], op.k, "dim 1")
    return [TensorSpec((tokens, hidden), dtype)]


def _tiling(op: Call) -> None:
    for name in _RANGES:
        if getattr(op, name) != _NO_RANGE:
            raise op.error(name, got=getattr(op, name), want=f"{_NO_RANGE} (no such experts)")
    if op.x2 is not None and op.x1 is None:
        raise op.error("x1", got="nothing", want="a tensor, since x2 is given")
    if op.bias is not None and op.expert_idx is None:
        raise op.error("expert_idx", got="nothing", want="a tensor, since bias is given")
    op.expect_at_least("k", 1)
    (copies,) = op.dims("expanded_row_idx", rank=1)
    if op.scales is not None:
        tokens, top_k = op.dims("scales", rank=2)
        op.expect_equal("expanded_row_idx", copies, mul(tokens, top_k), "dim 0")
    elif isinstance(copies, int) and copies % op.k:
        raise op.error(
            "expanded_row_idx", got=f"{copies} indices", want=f"a multiple of k = {op.k}"
        )


def _top_k(op: Any) -> int:
    return int(op.k if op.scales is None else op.scales.shape[1])


def _rows_by_copy(op: Call, top_k: int) -> torch.Tensor:
    """Return the row of copy (i, k) at ``[k, i]``."""
    row_idx: torch.Tensor = op.expanded_row_idx
    tokens = row_idx.numel() // max(top_k, 1)
    if is_row_major(op.drop_pad_mode):
        return row_idx.view(tokens, top_k).t().contiguous()
    return row_idx.view(top_k, tokens)


def _check_indices(op: Call, rows: int) -> None:
    low_allowed = -1 if has_drops(op.drop_pad_mode) else 0
    check_range(op, "expanded_row_idx", low_allowed, rows, "the rows of expanded_x")
    if op.bias is not None:
        check_range(op, "expert_idx", 0, op.bias.shape[0], "the rows of bias")


def check_range(op: Call, argument: str, low: int, end: int, meaning: str) -> None:
    """Raise unless all values of the integer tensor `argument` are in ``[low, end)``."""
    tensor = getattr(op, argument)
    if tensor.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(tensor))
    if smallest < low or largest >= end:
        raise op.error(
            argument,
            got=f"values from {smallest} to {largest}",
            want=f"values in [{low}, {end}), {meaning}",
        )


def _sum_dtype(op: Call) -> torch.dtype:
    in_half = op.expanded_x.dtype is torch.float16 and op.soc is not Soc.ASCEND950
    return torch.float16 if in_half else torch.float32


def _compute(op: Call) -> Tensors:
    hidden = op.expanded_x.shape[-1]
    rows = op.expanded_x.reshape(-1, hidden)
    _check_indices(op, rows.shape[0])
    top_k = _top_k(op)
    index = _rows_by_copy(op, top_k)
    tokens = index.shape[1]
    experts = op.expert_idx.t().contiguous() if op.bias is not None else None
    kept = None
    if has_drops(op.drop_pad_mode):
        kept = index >= 0
        index = index.clamp(min=0)
    sum_dtype = _sum_dtype(op)
    output = op.new_output((tokens, hidden), rows.dtype, rows.device)

    def work(chunk: slice) -> None:
        y = output[chunk]
        total = y if y.dtype is sum_dtype else torch.empty_like(y, dtype=sum_dtype)
        _start(op, chunk, total)
        for k in range(top_k if rows.shape[0] else 0):
            part = rows.index_select(0, index[k, chunk]).to(sum_dtype)
            if experts is not None:
                part.add_(op.bias.index_select(0, experts[k, chunk]))
            if op.scales is not None:
                part.mul_(op.scales[chunk, k : k + 1])
            if kept is None:
                total.add_(part)
            else:
                # A select, not a product with 0: dropped copies must not touch the sum.
                torch.where(kept[k, chunk].unsqueeze(1), total + part, total, out=total)
        if total is not y:
            y.copy_(total)

    run_parts(work, row_chunks(tokens, hidden))
    return [output]


def _start(op: Call, chunk: slice, total: torch.Tensor) -> None:
    """Set `total` to ``x1 + x2``."""
    if op.x1 is None:
        total.zero_()
    else:
        total.copy_(op.x1[chunk])
    if op.x2 is not None:
        total.add_(op.x2[chunk])


def _naive(op: Call) -> Tensors:
    hidden = op.expanded_x.shape[-1]
    rows = op.expanded_x.reshape(-1, hidden)
    _check_indices(op, rows.shape[0])
    top_k = _top_k(op)
    tokens = op.expanded_row_idx.numel() // max(top_k, 1)
    dtype = _sum_dtype(op)
    output = torch.empty((tokens, hidden), dtype=rows.dtype)
    for i in range(tokens):
        total = torch.zeros(hidden, dtype=dtype)
        if op.x1 is not None:
            total = op.x1[i].to(dtype)
        if op.x2 is not None:
            total = total + op.x2[i].to(dtype)
        for k in range(top_k):
            at = i * top_k + k if is_row_major(op.drop_pad_mode) else k * tokens + i
            row = int(op.expanded_row_idx[at])
            if row == -1:
                continue
            part = rows[row].to(dtype)
            if op.bias is not None:
                part = part + op.bias[op.expert_idx[i, k]].to(dtype)
            if op.scales is not None:
                part = part * op.scales[i, k].to(dtype)
            total = total + part
        output[i] = total
    return [output]


_ROWS = (torch.float16, torch.float32, torch.bfloat16, torch.bfloat16)
_ROWS_950 = (torch.float16,) * 3 + (torch.float32,) * 3 + (torch.bfloat16,) * 3
_SCALES = (torch.float16, torch.float32, torch.bfloat16, torch.float32)
_SCALES_950 = (torch.float16, torch.float32, torch.bfloat16) * 3

OPDEF = register(
    OpDef(
        ge_type="MoeFinalizeRoutingV2",
        inputs=(
            Input("expanded_x", _ROWS, dtypes_950=_ROWS_950),
            Input("expanded_row_idx", (torch.int32,)),
            Input("x1", _ROWS, "optional", _ROWS_950),
            Input("x2", _ROWS, "optional", _ROWS_950),
            Input("bias", _ROWS, "optional", _ROWS_950),
            Input("scales", _SCALES, "optional", _SCALES_950),
            Input("expert_idx", (torch.int32,), "optional"),
        ),
        outputs=(Output("y"),),
        attrs=(
            Attr("drop_pad_mode", "Int", 0),
            *(Attr(name, "ListInt", _NO_RANGE) for name in _RANGES),
            Attr("k", "Int", 1),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        autograd=AUTOGRAD,
        doc="ops-transformer moe/moe_finalize_routing_v2: infershape, tiling; "
        "docs/aclnnMoeFinalizeRoutingV2.md; sum order of MoeFinalizeRouting's kernels",
    )
)
