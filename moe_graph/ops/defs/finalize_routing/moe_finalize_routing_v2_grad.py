"""MoeFinalizeRoutingV2Grad: gradient of MoeFinalizeRoutingV2 (row-major index lists).

With copy ``c = i * K + k`` of token ``i`` and its row ``r = expanded_row_idx[c]``:

- ``grad_expanded_x[r] = grad_y[i] * scales[i, k]``; rows of dropped copies do not exist, free slots
  of drop/pad are zero;
- ``grad_scales[i, k] = sum over j of (expanded_x[r, j] + bias[e, j]) * grad_y[i, j]`` with
  ``e = expert_idx[i, k]``, 0 for a dropped copy.

Without ``scales`` K is 1 and ``grad_scales`` is left unwritten.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import UNKNOWN_RANK, Dim, minimum, mul
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, Tensors, TensorSpec
from moe_graph.ops.registry import register

DROPLESS, DROP_PAD = 0, 1
_OPTIONAL = ("expanded_x", "scales", "expert_idx", "bias")


def _shapes(op: Call) -> Specs:
    drop_pad = op.expect_one_of("drop_pad_mode", (DROPLESS, DROP_PAD)) == DROP_PAD
    for name in ("active_num", "expert_num", "expert_capacity"):
        op.expect_at_least(name, 0)
    scales_dtype = (op.grad_y if op.scales is None else op.scales).dtype
    present = [getattr(op, name) for name in ("grad_y", "expanded_row_idx", *_OPTIONAL)]
    if not all(spec is None or spec.rank_known for spec in present):
        return [
            TensorSpec(UNKNOWN_RANK, op.grad_y.dtype),
            TensorSpec(UNKNOWN_RANK, scales_dtype),
        ]
    tokens, hidden = op.dims("grad_y", rank=2)
    (copies,) = op.dims("expanded_row_idx", rank=1)
    top_k = 1 if op.scales is None else op.dims("scales", rank=2)[1]
    expanded: tuple[Dim, ...]
    if drop_pad:
        expanded = (op.expert_num, op.expert_capacity, hidden)
    else:
        expanded = (minimum(copies, op.active_num) if op.active_num > 0 else copies, hidden)
    return [TensorSpec(expanded, op.grad_y.dtype), TensorSpec((tokens, top_k), scales_dtype)]


def _tiling(op: Call) -> None:
    tokens, hidden = op.dims("grad_y", rank=2)
    (copies,) = op.dims("expanded_row_idx", rank=1)
    if op.scales is None:
        op.expect_equal("expanded_row_idx", copies, tokens, "dim 0")
    else:
        _check_scaled(op)
    if op.bias is not None:
        if op.expert_idx is None:
            raise op.error("expert_idx", got="nothing", want="a tensor, since bias is given")
        experts, bias_hidden = op.dims("bias", rank=2)
        op.expect_equal("bias", bias_hidden, hidden, "dim 1")
        if op.drop_pad_mode == DROP_PAD:
            op.expect_equal("bias", experts, op.expert_num, "dim 0")
    if op.drop_pad_mode == DROP_PAD:
        op.expect_at_least("expert_num", 1)
        op.expect_at_least("expert_capacity", 1)


def _check_scaled(op: Call) -> None:
    tokens, hidden = op.dims("grad_y", rank=2)
    (copies,) = op.dims("expanded_row_idx", rank=1)
    scale_tokens, top_k = op.dims("scales", rank=2)
    op.expect_equal("scales", scale_tokens, tokens, "dim 0")
    op.expect_equal("expanded_row_idx", copies, mul(tokens, top_k), "dim 0")
    if op.expanded_x is None:
        raise op.error("expanded_x", got="nothing", want="a tensor, since scales is given")
    rows = op.dims("expanded_x", rank=3 if op.drop_pad_mode == DROP_PAD else 2)
    op.expect_equal("expanded_x", rows[-1], hidden, "last dim")
    if op.drop_pad_mode == DROP_PAD:
        op.expect_equal("expanded_x", rows[0], op.expert_num, "dim 0")
        op.expect_equal("expanded_x", rows[1], op.expert_capacity, "dim 1")
    else:
        wanted = minimum(copies, op.active_num) if op.active_num > 0 else copies
        op.expect_equal("expanded_x", rows[0], wanted, "dim 0")
    if op.expert_idx is not None:
        id_tokens, id_k = op.dims("expert_idx", rank=2)
        op.expect_equal("expert_idx", id_tokens, tokens, "dim 0")
        op.expect_equal("expert_idx", id_k, top_k, "dim 1")


def _rows(op: Call) -> int:
    """Return the rows of grad_expanded_x, flattened over experts."""
    if op.drop_pad_mode == DROP_PAD:
        return int(op.expert_num * op.expert_capacity)
    copies: int = op.expanded_row_idx.numel()
    return min(copies, op.active_num) if op.active_num > 0 else copies


def _check_indices(op: Call) -> None:
    row_idx = op.expanded_row_idx
    if op.drop_pad_mode == DROP_PAD:
        check_range(op, "expanded_row_idx", row_idx, -1, _rows(op), "the slots")
    else:
        check_range(op, "expanded_row_idx", row_idx, 0, row_idx.numel(), "the token copies")
    if op.bias is not None:
        check_range(op, "expert_idx", op.expert_idx, 0, op.bias.shape[0], "the rows of bias")


def _copy_of_row(op: Call, rows: int) -> torch.Tensor:
    """Return the copy that each row belongs to, -1 for a row of no copy.

    Raises:
        OpError: two copies share a row, so that its gradient would be written twice.
    """
    index = op.expanded_row_idx
    copies = torch.arange(index.numel(), device=index.device)
    kept = (index >= 0) & (index < rows)
    copy_of_row = torch.full((rows,), -1, device=index.device)
    copy_of_row[index[kept].to(torch.int64)] = copies[kept]
    distinct = int((copy_of_row >= 0).sum())
    if distinct != (wanted := int(kept.sum())):
        raise op.error(
            "expanded_row_idx",
            got=f"{distinct} rows for {wanted} copies",
            want="a row of its own for each copy",
        )
    return copy_of_row


def _unfilled(op: Call) -> float:
    """Return what a row of no copy holds: free slots are cleared, others stay unwritten."""
    return 0.0 if op.drop_pad_mode == DROP_PAD else torch.nan


def _expanded_shape(op: Call, rows: int) -> tuple[int, ...]:
    hidden = op.grad_y.shape[1]
    if op.drop_pad_mode == DROP_PAD:
        return op.expert_num, op.expert_capacity, hidden
    return rows, hidden


def _compute(op: Call) -> Tensors:
    _check_indices(op)
    tokens, hidden = op.grad_y.shape
    top_k = 1 if op.scales is None else op.scales.shape[1]
    rows = _rows(op)
    copy_of_row = _copy_of_row(op, rows)
    filled = copy_of_row >= 0
    all_filled = bool(filled.all())
    copy = copy_of_row if all_filled else copy_of_row.clamp(min=0)
    token = torch.div(copy, top_k, rounding_mode="floor")
    grad_expanded = op.new_output(_expanded_shape(op, rows), op.grad_y.dtype, op.grad_y.device)
    grad_rows = grad_expanded.view(rows, hidden)
    if op.scales is None:
        scale = dot = expanded = None
    else:
        scale = op.scales.reshape(-1)[copy].to(torch.float32).unsqueeze(1)
        dot = scale.new_empty(rows)
        expanded = op.expanded_x.reshape(-1, hidden)

    def work(chunk: slice) -> None:
        grad = op.grad_y.index_select(0, token[chunk]).to(torch.float32)
        if scale is not None and dot is not None and expanded is not None:
            value = expanded[chunk]
            if op.bias is not None:
                experts = op.expert_idx.reshape(-1)[copy[chunk]]
                value = value.to(torch.float32) + op.bias.index_select(0, experts)
            torch.sum(grad * value, 1, out=dot[chunk])
            torch.mul(grad, scale[chunk], out=grad_rows[chunk])
        else:
            grad_rows[chunk] = grad

    # Row by row, not copy by copy: expanded_x and its gradient are then read and written in order.
    run_parts(work, row_chunks(rows if tokens else 0, hidden))
    if not all_filled:
        grad_rows.masked_fill_(~filled.unsqueeze(1), _unfilled(op))
    return [grad_expanded, _grad_scales(op, copy_of_row, filled, dot)]


def _grad_scales(
    op: Call, copy_of_row: torch.Tensor, filled: torch.Tensor, dot: torch.Tensor | None
) -> torch.Tensor:
    """Put the dot product of each row at its copy; copies without a row get 0."""
    grad_scales: torch.Tensor
    if dot is None:
        grad_scales = op.grad_y.new_full((op.grad_y.shape[0], 1), torch.nan)
    else:
        grad_scales = op.scales.new_zeros(op.scales.shape)
        grad_scales.view(-1)[copy_of_row[filled]] = dot[filled].to(grad_scales.dtype)
    return grad_scales


def _naive(op: Call) -> Tensors:
    _check_indices(op)
    tokens, hidden = op.grad_y.shape
    top_k = 1 if op.scales is None else op.scales.shape[1]
    rows = _rows(op)
    grad_rows = torch.full((rows, hidden), _unfilled(op), dtype=op.grad_y.dtype)
    grad_scales = torch.full((tokens, 1), torch.nan, dtype=op.grad_y.dtype)
    if op.scales is not None:
        grad_scales = torch.zeros((tokens, top_k), dtype=op.scales.dtype)
        expanded = op.expanded_x.reshape(-1, hidden)
    for i in range(tokens):
        grad = op.grad_y[i].to(torch.float32)
        for k in range(top_k):
            row = int(op.expanded_row_idx[i * top_k + k])
            if row == -1 or row >= rows:
                continue
            grad_rows[row] = grad if op.scales is None else grad * op.scales[i, k].to(torch.float32)
            if op.scales is not None:
                value = expanded[row].to(torch.float32)
                if op.bias is not None:
                    value = value + op.bias[op.expert_idx[i, k]].to(torch.float32)
                grad_scales[i, k] = (value * grad).sum()
    return [grad_rows.view(_expanded_shape(op, rows)), grad_scales]


_ROWS = (torch.float16, torch.float32, torch.bfloat16)
_ROWS_950 = (torch.float16,) * 3 + (torch.float32,) * 3 + (torch.bfloat16,) * 3
_SCALES_950 = (torch.float16, torch.float32, torch.bfloat16) * 3

OPDEF = register(
    OpDef(
        ge_type="MoeFinalizeRoutingV2Grad",
        inputs=(
            Input("grad_y", _ROWS, dtypes_950=_ROWS_950),
            Input("expanded_row_idx", (torch.int32,)),
            Input("expanded_x", _ROWS, "optional", _ROWS_950),
            Input("scales", _ROWS, "optional", _SCALES_950),
            Input("expert_idx", (torch.int32,), "optional"),
            Input("bias", _ROWS, "optional", _ROWS_950),
        ),
        outputs=(Output("grad_expanded_x"), Output("grad_scales")),
        attrs=(
            Attr("drop_pad_mode", "Int", 0),
            Attr("active_num", "Int", 0),
            Attr("expert_num", "Int", 0),
            Attr("expert_capacity", "Int", 0),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        checked_outputs=("grad_expanded_x", "grad_scales"),
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "dropless",
                {
                    "grad_y": "T H",
                    "expanded_row_idx": "T*K",
                    "expanded_x": "T*K H",
                    "scales": "T K",
                },
            ),
            Form("without scales", {"grad_y": "T H", "expanded_row_idx": "T"}),
            Form(
                "drop/pad",
                {
                    "grad_y": "T H",
                    "expanded_row_idx": "T*K",
                    "expanded_x": "E C H",
                    "scales": "T K",
                },
                {"drop_pad_mode": 1, "expert_num": "E", "expert_capacity": "C"},
            ),
        ),
        function="moe_finalize_routing_grad",
        doc="ops-transformer moe/moe_finalize_routing_v2_grad: infershape, tiling",
    )
)
