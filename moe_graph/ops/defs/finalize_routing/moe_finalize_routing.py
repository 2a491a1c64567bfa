"""MoeFinalizeRouting: bring the experts' rows back to token order and add them up (first version).

``y[i] = x1[i] + x2[i] + sum over k of scales[i, k] * (expanded_x[row] + bias[e])`` with
``row = expanded_row_idx[k * T + i]`` and ``e = expanded_expert_idx[i, k]``.

Products and sums are taken one after the other, k ascending; float16 is summed in float16, bfloat16
in float32 with one final rounding. No copy is dropped. Ascend 950 has only MoeFinalizeRoutingV2.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.finalize_routing.combine import Copies, combine, sum_dtype
from moe_graph.ops.dims import UNKNOWN, UNKNOWN_RANK, is_unknown, mul
from moe_graph.ops.opdef import Call, Form, Input, OpDef, Output, Specs, Tensors, TensorSpec
from moe_graph.ops.registry import register

_RANKS = {
    "expanded_x": 2,
    "x1": 2,
    "x2": 2,
    "bias": 2,
    "scales": 2,
    "expanded_row_idx": 1,
    "expanded_expert_idx": 2,
}


def _shapes(op: Call) -> Specs:
    present = [name for name in _RANKS if getattr(op, name) is not None]
    dims = {name: op.dims(name, _RANKS[name]) for name in present}
    dtype = op.expanded_x.dtype
    if not all(getattr(op, name).rank_known for name in present):
        return [TensorSpec(UNKNOWN_RANK, dtype)]
    if any(is_unknown(dim) for shape in dims.values() for dim in shape):
        return [TensorSpec((UNKNOWN, UNKNOWN), dtype)]
    rows, hidden = dims["expanded_x"]
    tokens, top_k = dims["scales"]
    op.expect_equal("expanded_row_idx", dims["expanded_row_idx"][0], rows, "dim 0")
    op.expect_equal("expanded_expert_idx", dims["expanded_expert_idx"][1], top_k, "dim 1")
    for name in ("x1", "x2", "expanded_expert_idx"):
        if name in dims:
            op.expect_equal(name, dims[name][0], tokens, "dim 0")
    for name in ("x1", "x2", "bias"):
        if name in dims:
            op.expect_equal(name, dims[name][1], hidden, "dim 1")
    return [TensorSpec((tokens, hidden), dtype)]


def _tiling(op: Call) -> None:
    (copies,) = op.dims("expanded_row_idx", rank=1)
    tokens, top_k = op.dims("scales", rank=2)
    op.expect_equal("expanded_row_idx", copies, mul(tokens, top_k), "dim 0")


def _copies(op: Call) -> Copies:
    tokens, top_k = op.scales.shape
    copies = Copies(
        op.expanded_row_idx.view(top_k, tokens), op.expanded_expert_idx.t().contiguous()
    )
    copies.check(op, op.expanded_x.shape[0], "expanded_expert_idx")
    return copies


def _compute(op: Call) -> Tensors:
    return [combine(op, _copies(op))]


def _naive(op: Call) -> Tensors:
    _copies(op)
    tokens, top_k = op.scales.shape
    dtype = sum_dtype(op)
    output = torch.empty((tokens, op.expanded_x.shape[1]), dtype=op.expanded_x.dtype)
    for i in range(tokens):
        total = op.x1[i].to(dtype)
        if op.x2 is not None:
            total = total + op.x2[i].to(dtype)
        for k in range(top_k):
            row = op.expanded_x[op.expanded_row_idx[k * tokens + i]].to(dtype)
            bias = op.bias[op.expanded_expert_idx[i, k]].to(dtype)
            total = total + op.scales[i, k].to(dtype) * (row + bias)
        output[i] = total
    return [output]


_ROWS = (torch.float16, torch.float32, torch.bfloat16)

OPDEF = register(
    OpDef(
        ge_type="MoeFinalizeRouting",
        inputs=(
            Input("expanded_x", _ROWS),
            Input("x1", _ROWS),
            Input("x2", _ROWS, "optional"),
            Input("bias", _ROWS),
            Input("scales", _ROWS),
            Input("expanded_row_idx", (torch.int32,)),
            Input("expanded_expert_idx", (torch.int32,)),
        ),
        outputs=(Output("y"),),
        attrs=(),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        checked_outputs=("y",),
        no_gradient="torch_npu has none for it; moe_finalize_routing computes the same and has one",
        forms=(
            Form(
                "dropless, column order",
                {
                    "expanded_x": "T*K H",
                    "x1": "T H",
                    "x2": "T H",
                    "bias": "E H",
                    "scales": "T K",
                    "expanded_row_idx": "T*K",
                    "expanded_expert_idx": "T K",
                },
            ),
        ),
        products=(Soc.A2, Soc.A3),
        doc="ops-transformer moe/moe_finalize_routing: infershape, tiling, kernels; "
        "docs/aclnnMoeFinalizeRouting.md",
    )
)
