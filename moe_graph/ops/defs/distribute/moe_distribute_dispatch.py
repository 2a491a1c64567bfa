"""MoeDistributeDispatch and its newer versions: send token rows to the ranks of their experts.

Routed expert g lives on rank ``shared_expert_rank_num + g // L``, with L experts per rank. A rank
receives, contiguously: local experts in order, for each the source ranks in order, for each their
copies in the order (token, k).

- ``expand_x`` ``[A, H]``: the rows; those beyond the ones received are unwritten.
- ``expert_token_nums`` ``[L]``: rows per local expert (type 1) or running sums (type 0).
- ``ep_recv_count[e * ep + r]``: running sum of the counts in that order.
- ``expand_scales[i]``: the expert_scale of row i.
- from the second version: ``assist_info_for_combine[3i : 3i + 3]``: source rank, token and k of
  row i.
- first version: ``expand_idx`` ``[BS * K]``.
- third version: ``context`` and ``ccl_buffer_size`` in place of the names of the groups.

The values of expand_idx, ep_recv_count and expand_scales differ between products and versions:
nothing but combine should read them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.distribute.dispatching import check_tiling, infer_shapes
from moe_graph.ops.defs.distribute.execution import NO_GRADIENT, across_ranks
from moe_graph.ops.defs.distribute.ir import (
    CONTEXT,
    EXAMPLE,
    GROUP,
    SECOND_VERSION,
    THIRD_EXAMPLE,
)
from moe_graph.ops.defs.distribute.limits import (
    first_version_limits,
    fullmesh_v2_limits,
    limits,
)
from moe_graph.ops.defs.distribute.quantisation import NO_QUANT, UNDEFINED
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output
from moe_graph.ops.registry import register

_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
_FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)
_E8M0 = torch.float8_e8m0fnu
_X_950 = (_BF16, _F16, *_FP8, *_FP8, torch.float4_e2m1fn_x2)
_SCALES_950 = (_F32, _F32, _F32, _F32, _E8M0, _E8M0, _E8M0)


def _inputs(*more: Input) -> tuple[Input, ...]:
    return (
        Input("x", (_BF16, _F16), dtypes_950=_X_950 if more else None),
        Input("expert_ids", (torch.int32,)),
        Input("scales", (_F32,), "optional", dtypes_950=_SCALES_950 if more else None),
        Input("x_active_mask", (torch.bool,), "optional"),
        Input("expert_scales", (_F32,), "optional"),
        *more,
    )


def _outputs(assist: str) -> tuple[Output, ...]:
    return (
        Output("expand_x"),
        Output("dynamic_scales"),
        Output(assist, dtype=torch.int32),
        Output("expert_token_nums", dtype=torch.int64),
        Output("ep_recv_count", dtype=torch.int32),
        Output("tp_recv_count", dtype=torch.int32),
        Output("expand_scales", dtype=_F32),
    )


_MODES = (
    Attr("quant_mode", "Int", 0),
    Attr("global_bs", "Int", 0),
    Attr("expert_token_nums_type", "Int", 1),
)
_FORMS = (
    Form("64 experts on 16 ranks", {"x": "BS H", "expert_ids": "BS K"}, EXAMPLE),
    Form(
        "int8 rows",
        {"x": "BS H", "expert_ids": "BS K", "scales": "64 H"},
        {**EXAMPLE, "quant_mode": 2},
    ),
)


_CONTEXT = Input("context", (torch.int32,))
_NEWER_INPUTS = _inputs(
    Input("elastic_info", (torch.int32,), "optional"),
    Input("performance_info", (torch.int64,), "optional"),
)
_NEWER_ATTRS = (*_MODES, *SECOND_VERSION, Attr("y_dtype", "Int", UNDEFINED))
_NEWER_LIMITS = (
    *limits("moe_distribute_dispatch_v2", "x"),
    *fullmesh_v2_limits("moe_distribute_dispatch_v2"),
)


def _unused(op: Call) -> tuple[str, ...]:
    return ("dynamic_scales",) if op.quant_mode == NO_QUANT and op.scales is None else ()


def _define(ge_type: str, *, first_version: bool, **parts: Any) -> OpDef:
    return register(
        OpDef(
            ge_type=ge_type,
            shape_rule=functools.partial(infer_shapes, first_version=first_version),
            tiling_rule=functools.partial(check_tiling, first_version=first_version),
            infershape_checks_dtypes=False,
            checked_outputs=(
                "expand_x",
                "dynamic_scales",
                parts["outputs"][2].name,
                "expert_token_nums",
                "ep_recv_count",
            ),
            unchecked_outputs=_unused,
            compute=across_ranks,
            naive=across_ranks,
            no_gradient=NO_GRADIENT,
            **{"forms": _FORMS, **parts},
        )
    )


FIRST = _define(
    "MoeDistributeDispatch",
    first_version=True,
    inputs=_inputs(),
    outputs=_outputs("expand_idx"),
    attrs=(*GROUP, *_MODES),
    limits=first_version_limits("moe_distribute_dispatch", "x"),
    doc="ops-transformer mc2/moe_distribute_dispatch: infershape, tiling",
)

SECOND = _define(
    "MoeDistributeDispatchV2",
    first_version=False,
    inputs=_NEWER_INPUTS,
    outputs=_outputs("assist_info_for_combine"),
    attrs=(*GROUP, *_NEWER_ATTRS),
    limits=_NEWER_LIMITS,
    function="moe_distribute_dispatch_v2",
    doc="ops-transformer mc2/moe_distribute_dispatch_v2: infershape, tiling, fullmesh kernels",
)

THIRD = _define(
    "MoeDistributeDispatchV3",
    first_version=False,
    inputs=(_CONTEXT, *_NEWER_INPUTS),
    outputs=_outputs("assist_info_for_combine"),
    attrs=(*CONTEXT, *_NEWER_ATTRS),
    limits=_NEWER_LIMITS,
    products=(Soc.A3, Soc.ASCEND950),
    forms=(
        Form(
            "64 experts on 16 ranks",
            {"context": "1 C", "x": "BS H", "expert_ids": "BS K"},
            THIRD_EXAMPLE,
        ),
    ),
    doc="ops-transformer mc2/moe_distribute_dispatch_v3: definition; infershape, tiling of V2",
)
