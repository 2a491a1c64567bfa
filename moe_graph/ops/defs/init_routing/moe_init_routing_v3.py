"""MoeInitRoutingV3: route the copies whose expert is in a range, and quantise their rows.

Of the flat ids ``[T * K]`` those in ``active_expert_range = [s, e)`` (all experts when empty) are
valid; let V be their number and ``o`` their order, ascending by id and stable.

- dropless: ``expanded_x[i] = x[o[i] // K]`` for ``i < min(V, rows)``, where rows is ``T * K``, or
  less for an ``active_num > 0``; later rows are unwritten.
- drop/pad, all experts: as MoeInitRoutingV2. Free slots of expanded_x are 0; their
  expanded_scale is unwritten.
- ``row_idx_type=0``: ``expanded_row_idx[o[i]] = i`` (the slot with drop/pad), -1 for copies that
  are not valid or dropped. ``row_idx_type=1``: ``expanded_row_idx[i] = o[i]``, unwritten from V on.
- ``expert_tokens_num_type``: 0 running sums, 1 counts, over ``[s, e)``; 2 pairs (id, count) of the
  experts that have tokens, then one (0, 0), then unwritten.
- ``quant_mode``: -1 none, ``expanded_scale[i]`` is the scale of the token where scale is given;
  0 static int8; 1 dynamic int8, see `int8_rounding.py`, with ``scale`` as smoothing factors of each
  expert or of all. Others exist on Ascend 950, of which only shapes and dtypes are known here.

Dynamic quantisation of rows that do not fit the on-chip buffer takes other roundings on the device
(through fp16, ties away from zero): there the last bit may differ from what is computed here.

An id out of every range is no error: it is not valid.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.init_routing.moe_init_routing_v3_kernel import compute, naive
from moe_graph.ops.defs.init_routing.moe_init_routing_v3_shapes import (
    DROP_PAD,
    GATHER,
    MAX_EXPERTS,
    NO_QUANT,
    check_tiling,
    infer_shapes,
)
from moe_graph.ops.limit import attribute
from moe_graph.ops.opdef import Attr, Autograd, Form, Input, Limit, OpDef, Output
from moe_graph.ops.registry import register


def _without_gradient(op: Any) -> str:
    """Return what in these arguments has no gradient, nothing where they have one."""
    if op.quant_mode != NO_QUANT:
        return f"quant_mode {op.quant_mode} rounds"
    if op.scale is not None or op.offset is not None:
        return "scale and offset are carried along, not differentiated"
    return "" if op.row_idx_type == GATHER else "row_idx_type 1 does not keep the row of each copy"


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.reason = _without_gradient(op)
    ctx.save_for_backward(outputs[1])
    ctx.top_k = int(op.expert_idx.shape[1])
    ctx.drop_pad_mode = op.drop_pad_mode
    given = tuple(op.active_expert_range)
    ctx.some_are_elsewhere = bool(given) and given != (0, op.expert_num)
    ctx.active_num = op.active_num


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> dict[str, torch.Tensor | None]:
    if ctx.reason:
        raise NotImplementedError(f"moe_init_routing has no gradient here: {ctx.reason}")
    (row_idx,) = ctx.saved_tensors
    mode = ctx.drop_pad_mode
    if mode != DROP_PAD and (ctx.some_are_elsewhere or ctx.active_num > 0):
        # Without drop/pad the gradient op reads the row of every copy; with it, it leaves out -1.
        row_idx = torch.where(row_idx < grad.shape[0], row_idx, -1)
        grad, mode = grad.unsqueeze(0), DROP_PAD
    grad_x = torch.ops.moe_graph.moe_init_routing_v2_grad(grad, row_idx, ctx.top_k, mode, 0)
    return {"x": grad_x}


_F16, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32
_FLOATS = (_F16, _BF16, _F32)
_FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)
_SOURCE = "ops-transformer moe/moe_init_routing_v3: infershape"

OPDEF = register(
    OpDef(
        ge_type="MoeInitRoutingV3",
        inputs=(
            Input(
                "x",
                (torch.int8, *_FLOATS),
                dtypes_950=(torch.int8, *_FLOATS, *_FP8, torch.uint8, torch.float4_e2m1fn_x2),
            ),
            Input("expert_idx", (torch.int32,)),
            Input(
                "scale",
                (_F32,),
                "optional",
                dtypes_950=(_F32,) * 4 + (torch.float8_e8m0fnu,) * 2 + (_F32, torch.float8_e8m0fnu),
            ),
            Input("offset", (_F32,), "optional"),
        ),
        outputs=(
            Output("expanded_x"),
            Output("expanded_row_idx", dtype=torch.int32),
            Output("expert_tokens_count_or_cumsum", dtype=torch.int64),
            Output("expanded_scale", dtype=_F32),
        ),
        attrs=(
            Attr("active_num", "Int", -1),
            Attr("expert_capacity", "Int", -1),
            Attr("expert_num", "Int", -1),
            Attr("drop_pad_mode", "Int", 0),
            Attr("expert_tokens_num_type", "Int", 0),
            Attr("expert_tokens_num_flag", "Bool", False),
            Attr("quant_mode", "Int", -1),
            Attr("active_expert_range", "ListInt", ()),
            Attr("row_idx_type", "Int", 0),
        ),
        shape_rule=infer_shapes,
        tiling_rule=check_tiling,
        limits=(
            Limit("expert_num", "E", attribute("expert_num"), _SOURCE, low=1, high=MAX_EXPERTS),
        ),
        infershape_checks_dtypes=False,
        compute=compute,
        naive=naive,
        autograd=Autograd(_save, _backward),
        forms=(
            Form(
                "experts 8 to 15 of 64",
                {"x": "T H", "expert_idx": "T K"},
                {
                    "expert_num": 64,
                    "active_expert_range": (8, 16),
                    "expert_tokens_num_flag": True,
                    "expert_tokens_num_type": 1,
                },
            ),
            Form(
                "dynamic int8, smoothed",
                {"x": "T H", "expert_idx": "T K", "scale": "64 H"},
                {
                    "expert_num": 64,
                    "expert_tokens_num_flag": True,
                    "expert_tokens_num_type": 2,
                    "quant_mode": 1,
                },
            ),
            Form(
                "drop/pad",
                {"x": "T H", "expert_idx": "T K"},
                {
                    "expert_num": 64,
                    "drop_pad_mode": 1,
                    "expert_capacity": "C",
                    "expert_tokens_num_flag": True,
                    "expert_tokens_num_type": 1,
                },
            ),
        ),
        function="moe_init_routing",
        doc="ops-transformer moe/moe_init_routing_v3: infershape, tiling, membase kernels",
    )
)
