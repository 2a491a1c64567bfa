"""MoeInitRoutingQuant: MoeInitRouting with rows ``int8(x * scale + offset)``.

`first_version.py` has the routing, `int8_rounding.py` the rounding; scale and offset are numbers.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.init_routing.first_version import infer_shapes, route, route_naively
from moe_graph.ops.defs.init_routing.int8_rounding import static_int8
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, Tensors
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    return infer_shapes(op, torch.int8)


def _numbers(op: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(op.scale), torch.tensor(op.offset)  # fp32, as the attributes are


def _compute(op: Call) -> Tensors:
    source, row_idx, sorted_ids = route(op)
    hidden = op.x.shape[1]
    expanded = op.new_output((source.shape[0], hidden), torch.int8, op.x.device)
    scale, offset = _numbers(op)

    def quantise(chunk: slice) -> None:
        expanded[chunk] = static_int8(op.x.index_select(0, source[chunk]), scale, offset)

    run_parts(quantise, row_chunks(source.shape[0], hidden))
    return [expanded, row_idx, sorted_ids]


def _naive(op: Call) -> Tensors:
    source, row_idx, sorted_ids = route_naively(op)
    expanded = torch.empty((len(source), op.x.shape[1]), dtype=torch.int8)
    scale, offset = _numbers(op)
    for row, token in enumerate(source):
        scaled = torch.nan_to_num(torch.round(op.x[token].float() * scale + offset), 0.0)
        expanded[row] = torch.clamp(scaled, -128, 127)
    return [expanded, row_idx, sorted_ids]


OPDEF = register(
    OpDef(
        ge_type="MoeInitRoutingQuant",
        inputs=(
            Input("x", (torch.float16, torch.bfloat16, torch.float32)),
            Input("row_idx", (torch.int32,)),
            Input("expert_idx", (torch.int32,)),
        ),
        outputs=(
            Output("expanded_x", dtype=torch.int8),
            Output("expanded_row_idx", dtype=torch.int32),
            Output("expanded_expert_idx", dtype=torch.int32),
        ),
        attrs=(Attr("active_num", "Int"), Attr("scale", "Float"), Attr("offset", "Float")),
        shape_rule=_shapes,
        checked_outputs=("expanded_x", "expanded_row_idx", "expanded_expert_idx"),
        compute=_compute,
        naive=_naive,
        no_gradient="it rounds to int8",
        products=(Soc.A2, Soc.A3),
        forms=(
            Form(
                "rows of active tokens",
                {"x": "T H", "row_idx": "T K", "expert_idx": "T K"},
                {"active_num": "A"},
            ),
        ),
        doc="ops-transformer moe/moe_init_routing_quant: infershape, tiling, kernel",
    )
)
