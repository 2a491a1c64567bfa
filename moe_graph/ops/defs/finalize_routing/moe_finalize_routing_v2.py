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

On Ascend 950 some experts may have no row: see `special_experts.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.finalize_routing.combine import Copies, combine, sum_dtype
from moe_graph.ops.defs.finalize_routing.moe_finalize_routing_v2_autograd import (
    AUTOGRAD,
    has_drops,
    is_row_major,
)
from moe_graph.ops.defs.finalize_routing.special_experts import (
    CONSTANTS,
    NO_RANGE,
    RANGES,
    SpecialExperts,
    check_ranges,
    has_special_experts,
)
from moe_graph.ops.dims import UNKNOWN, UNKNOWN_RANK, floordiv, is_unknown, mul
from moe_graph.ops.limit import attribute
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Form,
    Input,
    Limit,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register


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
    if op.x2 is not None and op.x1 is None:
        raise op.error("x1", got="nothing", want="a tensor, since x2 is given")
    if op.bias is not None and op.expert_idx is None:
        raise op.error("expert_idx", got="nothing", want="a tensor, since bias is given")
    (copies,) = op.dims("expanded_row_idx", rank=1)
    if op.scales is not None:
        tokens, top_k = op.dims("scales", rank=2)
        op.expect_equal("expanded_row_idx", copies, mul(tokens, top_k), "dim 0")
    else:
        tokens = floordiv(copies, max(op.k, 1))
        if isinstance(copies, int) and copies % max(op.k, 1):
            raise op.error(
                "expanded_row_idx", got=f"{copies} indices", want=f"a multiple of k = {op.k}"
            )
        if op.expert_idx is not None:
            op.expect_equal("expert_idx", op.dims("expert_idx", rank=2)[1], op.k, "dim 1")
    hidden = op.dims("expanded_x", rank=3 if has_drops(op.drop_pad_mode) else 2)[-1]
    check_ranges(op, tokens, hidden)


def _top_k(op: Any) -> int:
    return int(op.k if op.scales is None else op.scales.shape[1])


def _copies(op: Call) -> Copies:
    row: torch.Tensor = op.expanded_row_idx
    top_k = _top_k(op)
    tokens = row.numel() // max(top_k, 1)
    if is_row_major(op.drop_pad_mode):
        row = row.view(tokens, top_k).t().contiguous()
    else:
        row = row.view(top_k, tokens)
    expert = special = None
    if op.bias is not None or has_special_experts(op):
        expert = op.expert_idx.t().contiguous()
    if has_special_experts(op):
        assert expert is not None
        special = SpecialExperts(op, expert)
    return Copies(row, expert, special, may_drop=has_drops(op.drop_pad_mode))


def _checked_copies(op: Call) -> Copies:
    copies = _copies(op)
    rows = op.expanded_x.shape[:-1].numel()
    copies.check(op, rows, "expert_idx")
    return copies


def _compute(op: Call) -> Tensors:
    return [combine(op, _checked_copies(op))]


def _naive(op: Call) -> Tensors:
    _checked_copies(op)
    hidden = op.expanded_x.shape[-1]
    rows = op.expanded_x.reshape(-1, hidden)
    top_k = _top_k(op)
    tokens = op.expanded_row_idx.numel() // max(top_k, 1)
    dtype = sum_dtype(op)
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
            expert = None if op.expert_idx is None else int(op.expert_idx[i, k])
            if expert in range(*op.zero_expert_range):
                continue
            if expert in range(*op.copy_expert_range):
                part = op.x[i].to(dtype)
            elif expert in range(*op.constant_expert_range):
                assert expert is not None
                a1, a2, v = (
                    tensor[expert - op.constant_expert_range[0]].to(dtype)
                    for tensor in (op.a1, op.a2, op.v)
                )
                part = a1 * op.x[i].to(dtype) + a2 * v
            elif row == -1:
                continue
            else:
                part = rows[row].to(dtype)
            if op.bias is not None:
                part = part + op.bias[expert].to(dtype)
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
            *(
                Input(name, _ROWS, "optional", _ROWS_950, products=(Soc.ASCEND950,))
                for name in ("x", *CONSTANTS)
            ),
        ),
        outputs=(Output("y"),),
        attrs=(
            Attr("drop_pad_mode", "Int", 0),
            *(Attr(name, "ListInt", NO_RANGE) for name in RANGES),
            Attr("k", "Int", 1),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            Limit(
                "k",
                "k",
                attribute("k"),
                source="moe_finalize_routing_v2/docs/aclnnMoeFinalizeRoutingV2.md, constraint 5",
                low=1,
            ),
        ),
        checked_outputs=("y",),
        compute=_compute,
        naive=_naive,
        autograd=AUTOGRAD,
        forms=(
            Form(
                "dropless, row order",
                {"expanded_x": "T*K H", "expanded_row_idx": "T*K", "scales": "T K"},
                {"drop_pad_mode": 2},
            ),
            Form(
                "dropless, column order, without scales",
                {"expanded_x": "T*8 H", "expanded_row_idx": "T*8"},
                {"k": 8},
            ),
            Form(
                "drop/pad, with shared experts and bias",
                {
                    "expanded_x": "E C H",
                    "expanded_row_idx": "T*K",
                    "x1": "T H",
                    "x2": "T H",
                    "bias": "E H",
                    "scales": "T K",
                    "expert_idx": "T K",
                },
                {"drop_pad_mode": 3},
            ),
        ),
        function="moe_finalize_routing",
        doc="ops-transformer moe/moe_finalize_routing_v2: infershape, tiling; "
        "docs/aclnnMoeFinalizeRoutingV2.md and V3; sum order of MoeFinalizeRouting's kernels",
    )
)
