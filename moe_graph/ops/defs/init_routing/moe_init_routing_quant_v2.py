"""MoeInitRoutingQuantV2: MoeInitRoutingV2 with int8 rows.

- ``quant_mode`` 0: ``int8(x * scale + offset)``, one scale and one offset.
- ``quant_mode`` 1: each row by itself, ``dynamic_quant_scale`` per row; ``scale`` ``[E, H]`` or
  ``[1, H]`` smooths the rows before.

Free slots of drop/pad are 0, and their dynamic_quant_scale is unwritten. `int8_rounding.py` has the
rounding. Rows may be int4 on the device, which is not offered here: the dtype of an output is not
an attribute of the op.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.init_routing import moe_init_routing_v2
from moe_graph.ops.defs.init_routing.int8_rounding import (
    check_static,
    dynamic_int8,
    static_int8,
    to_int8,
)
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.poison import poisoned
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import Dim, mul
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Form,
    Input,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register

STATIC, DYNAMIC = 0, 1
_ROUTING = moe_init_routing_v2.OPDEF
_ROUTING_ATTRS = tuple(attr.name for attr in _ROUTING.attrs)


def _shapes(op: Call) -> Specs:
    expanded, *others = moe_init_routing_v2.infer_shapes(op)
    assert expanded is not None
    mode = op.expect_one_of("quant_mode", (STATIC, DYNAMIC))
    _check_scale(op, expanded.shape[-1])
    rows = expanded.shape[0] if len(expanded.shape) == 2 else mul(*expanded.shape[:2])
    scales = TensorSpec((rows,), torch.float32) if mode == DYNAMIC else None
    return [TensorSpec(expanded.shape, torch.int8), *others, scales]


def _check_scale(op: Call, hidden: Dim) -> None:
    if op.quant_mode == STATIC:
        check_static(op)
    elif op.scale is not None:
        rows, width = op.dims("scale", rank=2)
        if isinstance(rows, int) and rows not in (-1, 1, op.expert_num):
            raise op.error("scale", got=f"dim 0 {rows}", want=f"1 or {op.expert_num} experts")
        op.expect_equal("scale", width, hidden, "dim 1")


def _routed(op: Call, x: torch.Tensor, how: str) -> Tensors:
    """Return what MoeInitRoutingV2 makes of `x` with the ids and attributes of this call."""
    attrs = {name: getattr(op, name) for name in _ROUTING_ATTRS}
    outputs: Tensors = getattr(_ROUTING, how)([x, op.expert_idx], attrs, op.soc)
    return outputs


def _compute(op: Call) -> Tensors:
    # The routing alone: rows of no width.
    expanded, row_idx, *others = _routed(op, op.x.new_empty((op.x.shape[0], 0)), "kernel")
    assert expanded is not None
    assert row_idx is not None
    hidden, device = op.x.shape[1], op.x.device
    rows = expanded.shape[:-1].numel()
    (copies,) = ((row_idx >= 0) & (row_idx < rows)).nonzero(as_tuple=True)
    places = row_idx[copies].to(torch.int64)
    output = op.new_output((*expanded.shape[:-1], hidden), torch.int8, device).zero_()
    flat = output.view(rows, hidden)
    scales = poisoned((rows,), torch.float32, device) if op.quant_mode == DYNAMIC else None

    def quantise(chunk: slice) -> None:
        copy, place = copies[chunk], places[chunk]
        values = op.x.index_select(0, copy // max(op.expert_idx.shape[1], 1))
        if scales is None:
            flat[place] = static_int8(values, op.scale, op.offset)
            return
        smooth = None
        if op.scale is not None:
            experts = op.expert_idx.reshape(-1)[copy]
            smooth = op.scale[experts if op.scale.shape[0] > 1 else torch.zeros_like(experts)]
        flat[place], scales[place] = dynamic_int8(values, smooth)

    run_parts(quantise, row_chunks(copies.shape[0], hidden))
    return [output, row_idx, *others, scales]


def _naive(op: Call) -> Tensors:
    rows, row_idx, *others = _routed(op, op.x, "reference")
    assert rows is not None
    assert row_idx is not None
    flat = rows.reshape(-1, op.x.shape[1])
    output = torch.zeros(flat.shape, dtype=torch.int8)
    scales = poisoned((flat.shape[0],), torch.float32, op.x.device)
    for copy, row in enumerate(row_idx.tolist()):
        if not 0 <= row < flat.shape[0]:
            continue
        values = flat[row].float()
        if op.quant_mode == STATIC:
            output[row] = to_int8(values * op.scale[0] + op.offset[0])
            continue
        if op.scale is not None:
            expert = int(op.expert_idx.reshape(-1)[copy])
            values = values * op.scale[expert if op.scale.shape[0] > 1 else 0]
        scales[row] = values.abs().max() / 127 if values.numel() else 0.0
        output[row] = to_int8(values / scales[row])
    result = output.view(*rows.shape[:-1], op.x.shape[1])
    return [result, row_idx, *others, scales if op.quant_mode == DYNAMIC else None]


OPDEF = register(
    OpDef(
        ge_type="MoeInitRoutingQuantV2",
        inputs=(
            Input("x", (torch.float16, torch.bfloat16, torch.float32)),
            Input("expert_idx", (torch.int32,)),
            Input("scale", (torch.float32,), "optional"),
            Input("offset", (torch.float32,), "optional"),
        ),
        outputs=(
            Output("expanded_x", dtype=torch.int8),
            *_ROUTING.outputs[1:],
            Output("dynamic_quant_scale", required=False, dtype=torch.float32),
        ),
        attrs=(*_ROUTING.attrs, Attr("quant_mode", "Int", 0)),
        shape_rule=_shapes,
        checked_outputs=("expanded_x", "expanded_row_idx"),
        compute=_compute,
        naive=_naive,
        no_gradient="it rounds to int8",
        forms=(
            Form(
                "static",
                {"x": "T H", "expert_idx": "T K", "scale": "1", "offset": "1"},
                {"active_num": "A"},
            ),
            Form(
                "dynamic, smoothed",
                {"x": "T H", "expert_idx": "T K", "scale": "64 H"},
                {"quant_mode": 1, "expert_num": 64},
            ),
        ),
        doc="ops-transformer moe/moe_init_routing_quant_v2: infershape, tiling, membase kernels",
    )
)
