"""MoeInitRouting: sort token copies by expert and gather their rows; see `first_version.py`."""

from __future__ import annotations

import torch

from moe_graph.ops.defs.init_routing.first_version import infer_shapes, route, route_naively
from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, Tensors
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    return infer_shapes(op, op.x.dtype)


def _compute(op: Call) -> Tensors:
    source, row_idx, sorted_ids = route(op)
    expanded = op.new_output((source.shape[0], op.x.shape[1]), op.x.dtype, op.x.device)
    return [gather_rows(op.x, source, expanded), row_idx, sorted_ids]


def _naive(op: Call) -> Tensors:
    source, row_idx, sorted_ids = route_naively(op)
    expanded = torch.empty((len(source), op.x.shape[1]), dtype=op.x.dtype)
    for row, token in enumerate(source):
        expanded[row] = op.x[token]
    return [expanded, row_idx, sorted_ids]


OPDEF = register(
    OpDef(
        ge_type="MoeInitRouting",
        inputs=(
            Input("x", (torch.float16, torch.bfloat16, torch.float32)),
            Input("row_idx", (torch.int32,)),
            Input("expert_idx", (torch.int32,)),
        ),
        outputs=(
            Output("expanded_x"),
            Output("expanded_row_idx", dtype=torch.int32),
            Output("expanded_expert_idx", dtype=torch.int32),
        ),
        attrs=(Attr("active_num", "Int"),),
        shape_rule=_shapes,
        checked_outputs=("expanded_x", "expanded_row_idx", "expanded_expert_idx"),
        compute=_compute,
        naive=_naive,
        no_gradient="no product has one for this version; moe_init_routing (V2) has",
        forms=(
            Form(
                "rows of active tokens",
                {"x": "T H", "row_idx": "T K", "expert_idx": "T K"},
                {"active_num": "A"},
            ),
        ),
        doc="ops-transformer moe/moe_init_routing: infershape, tiling, kernel",
    )
)
