"""MoeDistributeCombine and its newer versions: bring the experts' rows back and add them up.

``x[t] = sum over k of expert_scales[t, k] * row(t, k)``, k ascending, in fp32; then the rows of the
shared experts and ``shared_expert_x`` are added, and the sum is rounded once. Entries that are
masked out or chose a zero expert add nothing; a copy expert adds ``expert_scales * ori_x``; a const
expert ``expert_scales * (a1 * ori_x + a2 * v)``, where a1, a2 are the softmax of the products of
ori_x with the two alphas.

``expert_ids`` and ``expert_scales`` are those of dispatch, and the rest of its inputs are outputs
of dispatch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.distribute.checks import (
    check_expert_scales,
    check_experts,
    check_global_bs,
    check_group,
    check_group_inputs,
    check_mask,
    is_ccu,
)
from moe_graph.ops.defs.distribute.execution import NO_GRADIENT, across_ranks
from moe_graph.ops.defs.distribute.ir import (
    CONTEXT,
    EXAMPLE,
    GROUP,
    SECOND_VERSION,
    THIRD_EXAMPLE,
)
from moe_graph.ops.defs.distribute.layout import Batch, Layout, layout_at_run_time
from moe_graph.ops.defs.distribute.limits import check_top_k, first_version_limits, limits
from moe_graph.ops.dims import UNKNOWN, Dim, known_less, mul
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, TensorSpec
from moe_graph.ops.registry import register

_RESERVED = ("activation_scale", "weight_scale", "group_list")


def _shapes(op: Call) -> Specs:
    tokens = _dim(op, "expert_ids", 0)
    hidden = _dim(op, "expand_x", 1)
    return [TensorSpec((tokens, hidden), op.expand_x.dtype)]


def _dim(op: Call, argument: str, index: int) -> Dim:
    """Return a dim of a matrix; the public rule answers -1 for a tensor of another rank."""
    shape = getattr(op, argument).shape
    if op.upstream and len(shape) <= index:
        return UNKNOWN
    return op.dims(argument, rank=2)[index]


def _tiling(op: Call) -> None:
    check_group(op)
    layout = layout_at_run_time(op)
    check_experts(op, layout)
    tokens, top_k = op.dims("expert_ids", rank=2)
    rows, hidden = op.dims("expand_x", rank=2)
    if not is_ccu(op):
        check_top_k(op, top_k)
    check_expert_scales(op, tokens, top_k)
    check_global_bs(op, tokens)
    check_mask(op, tokens, top_k)
    check_group_inputs(op)
    for name in _RESERVED:
        if getattr(op, name) is not None:
            raise op.error(name, got="a tensor", want="nothing: the input is reserved")
    for name in ("out_dtype", "group_list_type"):
        if getattr(op, name) != 0:
            raise op.error(name, got=getattr(op, name), want="0: the attribute is reserved")
    mx = op.soc is Soc.ASCEND950 and hasattr(op, "comm_alg")  # second version
    op.expect_one_of("comm_quant_mode", (0, 2, 3, 4) if mx else (0, 2))
    if op.expand_x.dtype is torch.int32:
        raise op.error("expand_x", got="int32", want="bfloat16 or float16: int32 is reserved")
    _check_special(op, tokens, hidden)
    if op.soc is not Soc.A2:
        _check_sizes(op, layout, rows)


def _check_sizes(op: Call, layout: Layout, rows: Dim) -> None:
    """Check the sizes of what dispatch returned (A3, 950)."""
    tokens, top_k = op.dims("expert_ids", rank=2)
    received = layout.rows(Batch.of(op, tokens), top_k, elastic=_is_elastic(op))
    if known_less(rows, received):
        raise op.error("expand_x", got=f"{rows} rows", want=f">= {received}, what can arrive")
    assist = "expand_idx" if hasattr(op, "expand_idx") else "assist_info_for_combine"
    (size,) = op.dims(assist, rank=1)
    if known_less(size, mul(tokens, top_k)):
        raise op.error(assist, got=f"{size} numbers", want=f">= {tokens} * {top_k}")
    (counts,) = op.dims("ep_send_counts", rank=1)
    blocks = layout.world * layout.local_experts
    if known_less(counts, blocks) and not _is_elastic(op):
        raise op.error("ep_send_counts", got=f"{counts} counts", want=f">= {blocks}")


def _is_elastic(op: Call) -> bool:
    return getattr(op, "elastic_info", None) is not None


def _check_special(op: Call, tokens: Dim, hidden: Dim) -> None:
    """Check what comes from beside the routed experts (second version)."""
    shared = getattr(op, "shared_expert_x", None)
    if shared is not None:
        *leading, width = shared.shape
        shared_tokens = functools.reduce(mul, leading, 1)
        op.expect_equal("shared_expert_x", shared_tokens, tokens, "tokens")
        op.expect_equal("shared_expert_x", width, hidden, "the last dim")
        if op.soc is not Soc.A2 and op.shared_expert_rank_num != 0:
            raise op.error(
                "shared_expert_x", got="a tensor", want="nothing where ranks hold shared experts"
            )
    if not hasattr(op, "ori_x"):
        return
    needs_x = op.copy_expert_num > 0 or op.const_expert_num > 0
    if needs_x and op.ori_x is None:
        raise op.error("ori_x", got="nothing", want="[BS, H], with copy or const experts")
    if op.ori_x is not None:
        x_tokens, x_hidden = op.dims("ori_x", rank=2)
        op.expect_equal("ori_x", x_tokens, tokens, "dim 0")
        op.expect_equal("ori_x", x_hidden, hidden, "dim 1")
    for name in ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"):
        given = getattr(op, name)
        if op.const_expert_num > 0 and given is None:
            raise op.error(name, got="nothing", want="[const_expert_num, H], with const experts")
        if given is not None:
            experts, width = op.dims(name, rank=2)
            op.expect_equal(name, experts, op.const_expert_num, "dim 0")
            op.expect_equal(name, width, hidden, "dim 1")


_ROWS = (torch.bfloat16, torch.float16, torch.int32)


def _row_input(name: str) -> Input:
    return Input(name, _ROWS, "optional")


def _inputs(assist: str, *more: Input) -> tuple[Input, ...]:
    return (
        Input("expand_x", _ROWS),
        Input("expert_ids", (torch.int32,)),
        Input(assist, (torch.int32,)),
        Input("ep_send_counts", (torch.int32,)),
        Input("expert_scales", (torch.float32,)),
        Input("tp_send_counts", (torch.int32,), "optional"),
        Input("x_active_mask", (torch.bool,), "optional"),
        Input("activation_scale", (torch.float32,), "optional"),
        Input("weight_scale", (torch.float32,), "optional"),
        Input("group_list", (torch.int64,), "optional"),
        Input("expand_scales", (torch.float32,), "optional"),
        *more,
    )


_ATTRS = (
    Attr("global_bs", "Int", 0),
    Attr("out_dtype", "Int", 0),
    Attr("comm_quant_mode", "Int", 0),
    Attr("group_list_type", "Int", 0),
)


def _form_shapes(assist: str) -> dict[str, str]:
    return {
        "expand_x": "A H",
        "expert_ids": "BS K",
        assist: "128*A",
        "ep_send_counts": "64",
        "expert_scales": "BS K",
    }


_ASSIST = "assist_info_for_combine"
_NEWER_INPUTS = _inputs(
    _ASSIST,
    _row_input("shared_expert_x"),
    Input("elastic_info", (torch.int32,), "optional"),
    _row_input("ori_x"),
    _row_input("const_expert_alpha_1"),
    _row_input("const_expert_alpha_2"),
    _row_input("const_expert_v"),
    Input("performance_info", (torch.int64,), "optional"),
)


def _define(ge_type: str, assist: str, **parts: Any) -> OpDef:
    shapes = _form_shapes(assist)
    return register(
        OpDef(
            ge_type=ge_type,
            outputs=(Output("x"),),
            shape_rule=_shapes,
            tiling_rule=_tiling,
            infershape_checks_dtypes=False,
            checked_outputs=("x",),
            compute=across_ranks,
            naive=across_ranks,
            no_gradient=NO_GRADIENT,
            **{"forms": (Form("64 experts on 16 ranks", shapes, EXAMPLE),), **parts},
        )
    )


FIRST = _define(
    "MoeDistributeCombine",
    "expand_idx",
    inputs=_inputs("expand_idx"),
    attrs=(*GROUP, *_ATTRS),
    limits=first_version_limits("moe_distribute_combine", "expand_x"),
    doc="ops-transformer mc2/moe_distribute_combine: infershape, tiling",
)

SECOND = _define(
    "MoeDistributeCombineV2",
    _ASSIST,
    inputs=_NEWER_INPUTS,
    attrs=(*GROUP, *_ATTRS, *SECOND_VERSION),
    limits=limits("moe_distribute_combine_v2", "expand_x"),
    function="moe_distribute_combine_v2",
    doc="ops-transformer mc2/moe_distribute_combine_v2: infershape, tiling, fullmesh kernels",
)

THIRD = _define(
    "MoeDistributeCombineV3",
    _ASSIST,
    inputs=(Input("context", (torch.int32,)), *_NEWER_INPUTS),
    attrs=(*CONTEXT, *_ATTRS, *SECOND_VERSION),
    limits=limits("moe_distribute_combine_v2", "expand_x"),
    products=(Soc.A3, Soc.ASCEND950),
    forms=(
        Form(
            "64 experts on 16 ranks",
            {"context": "1 C", **_form_shapes(_ASSIST)},
            THIRD_EXAMPLE,
        ),
    ),
    doc="ops-transformer mc2/moe_distribute_combine_v3: definition; infershape, tiling of V2",
)
