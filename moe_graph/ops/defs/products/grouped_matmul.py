"""GroupedMatmul: one matrix product per group.

| group_type | x                 | weight                        | split_item | y                  |
|------------|-------------------|-------------------------------|------------|--------------------|
| -1 (none)  | G of ``[M_i, K_i]``| G of ``[K_i, N_i]``          | 0, 1       | G of ``[M_i, N_i]``|
| 0 (rows)   | ``[M, K]``        | ``[G, K, N]`` or G of ``[K, N]``| 2, 3     | ``[M, N]``         |
| 0 (rows)   | G of ``[M_i, K]`` | G of ``[K, N]``               | 2, 3       | ``[sum M_i, N]``   |
| 2 (inner)  | ``[K, M]``, transposed | ``[K, N]``               | 2, 3       | ``[G, M, N]``      |
| 2 (inner)  | ``[sum K_i, M]``, transposed | G of ``[K_i, N_i]`` | 0, 1      | G of ``[M, N_i]``  |

``group_list`` (int64 ``[G]``) holds the running sum (``group_list_type=0``) or the size (1) of the
groups along the grouped axis; with ``group_list_type=2`` it is ``[G, 2]``, the index and the size
of each group, empty ones last, for quantised x. Rows of y beyond the last group are not computed:
they are NaN here.
``group_type=2`` is the weight gradient of ``group_type=0``; the product of an empty group is 0.
``transpose_weight`` reads weights as ``[N, K]``. Sums are fp32, with one rounding after the bias.

Quantised products (`grouped_matmul_dtypes.py` lists them) have dtypes and shapes here; int8 by int8
is computed (`grouped_matmul_int8.py`), the others are refused when they are executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.products.group_lists import COUNT, CUMSUM, SPARSE, UNGROUPED
from moe_graph.ops.defs.products.grouped_matmul_autograd import AUTOGRAD
from moe_graph.ops.defs.products.grouped_matmul_dtypes import Kind, check_dtypes, columns, kind
from moe_graph.ops.defs.products.grouped_matmul_kernel import compute, naive
from moe_graph.ops.defs.products.grouped_matmul_on_950 import check_mx, shapes_of_quantised
from moe_graph.ops.defs.products.grouped_matmul_scales import check_scales, check_when_run
from moe_graph.ops.defs.products.grouped_matmul_shapes import matrix, shapes
from moe_graph.ops.defs.products.grouped_matmul_weights_on_950 import (
    check_float8_weight,
    shapes_of_weight_quantised,
)
from moe_graph.ops.dims import UNKNOWN, Dim
from moe_graph.ops.limit import Limit, dim
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, TensorSpec
from moe_graph.ops.registry import register

MAX_GROUPS, MAX_TENSORS = 1024, 128
LAST_DIM_END = 65536

_ACTIVATIONS = {0: "none", 1: "relu", 2: "tanh gelu", 4: "fast gelu", 5: "silu"}


def _shapes(op: Call) -> Specs:
    _check_common(op)
    what = kind(op)
    for limit in _LIMITS_OF_INFERSHAPE:
        limit.check(op)
    if op.soc is Soc.ASCEND950 and what is Kind.FULL:
        return shapes_of_quantised(op)
    if op.soc is Soc.ASCEND950 and what is Kind.WEIGHT:
        return shapes_of_weight_quantised(op)
    check_scales(op)
    return shapes(op)


def _check_common(op: Call) -> None:
    op.expect_one_of("group_list_type", (CUMSUM, COUNT, SPARSE))
    op.expect_one_of("act_type", tuple(_ACTIVATIONS))
    for name in ("x", "weight"):
        if not getattr(op, name):
            raise op.error(name, got="no tensor", want="one or more")
    for name in ("x", "weight"):
        for spec in getattr(op, name):
            if not spec.rank_known:
                raise op.error(name, got="a tensor of unknown rank", want="2 or 3 dimensions")
    if kind(op) is not Kind.FULL:
        op.expect_one_of("act_type", (0,))
        op.expect_one_of("group_list_type", (CUMSUM, COUNT))


def _check_running(op: Call) -> None:
    if op.act_type and (op.x[0].dtype is not torch.int8 or not _is_float(op.scale)):
        want = "0 unless int8 x and weight have a float scale"
        raise op.error("act_type", got=op.act_type, want=want)
    if op.soc is not Soc.ASCEND950:
        check_when_run(op)
    elif kind(op) is Kind.FULL:
        check_mx(op)
    elif kind(op) is Kind.WEIGHT:
        check_float8_weight(op)
    if op.group_type == UNGROUPED and kind(op) is Kind.PLAIN:
        for x in op.x:
            matrix(op, "x", x)


def _is_float(scale: list[TensorSpec]) -> bool:
    return bool(scale) and scale[0].dtype in (torch.float32, torch.bfloat16)


def _largest_last_dim(argument: str) -> Callable[[Call], Dim]:
    def value(op: Call) -> Dim:
        sizes = [spec.shape[-1] for spec in getattr(op, argument)]
        known = [size for size in sizes if isinstance(size, int)]
        return max(known) if len(known) == len(sizes) else sizes[0]

    return value


def _groups(only: Literal["one weight", "a list"]) -> Callable[[Call], Dim]:
    def value(op: Call) -> Dim:
        applies = (len(op.weight) == 1) == (only == "one weight")
        return dim("group_list", 0)(op) if applies else UNKNOWN

    return value


def _tensors(argument: str) -> Callable[[Call], Dim]:
    return lambda op: len(getattr(op, argument))


_SOURCE = "aclnnGroupedMatmulV4 page"
_A2_A3 = (Soc.A2, Soc.A3)
_LIMITS_OF_INFERSHAPE = (
    *(
        Limit(
            name,
            f"last dim of {name}",
            _largest_last_dim(name),
            _SOURCE,
            high=LAST_DIM_END - 1,
            products=_A2_A3,
        )
        for name in ("x", "weight")
    ),
    Limit("group_list", "groups of one weight", _groups("one weight"), _SOURCE, high=MAX_GROUPS),
)
_LIMITS = (
    *(
        Limit(name, f"tensors of {name}", _tensors(name), _SOURCE, high=high, products=products)
        for name in ("x", "weight")
        for high, products in ((MAX_TENSORS, _A2_A3), (MAX_GROUPS, (Soc.ASCEND950,)))
    ),
    *_LIMITS_OF_INFERSHAPE,
    Limit(
        "group_list",
        "groups of a list of weights",
        _groups("a list"),
        _SOURCE,
        high=MAX_TENSORS,
        products=_A2_A3,
    ),
)


def _input(name: str, kind: Literal["dynamic", "optional"] = "dynamic") -> Input:
    return Input(name, columns(name, Soc.A2), kind, columns(name, Soc.ASCEND950))


OPDEF = register(
    OpDef(
        ge_type="GroupedMatmul",
        inputs=(
            _input("x"),
            _input("weight"),
            _input("bias"),
            _input("scale"),
            _input("offset"),
            _input("antiquant_scale"),
            _input("antiquant_offset"),
            Input("group_list", (torch.int64,), "optional"),
            _input("per_token_scale", "optional"),
        ),
        outputs=(Output("y", dynamic=True),),
        attrs=(
            Attr("split_item", "Int", 0),
            Attr("dtype", "Int", 0),
            Attr("transpose_weight", "Bool", False),
            Attr("transpose_x", "Bool", False),
            Attr("group_type", "Int", -1),
            Attr("group_list_type", "Int", 0),
            Attr("act_type", "Int", 0),
            Attr("tuning_config", "ListInt", (0,)),
        ),
        shape_rule=_shapes,
        dtype_rule=check_dtypes,
        tiling_rule=_check_running,
        checked_outputs=("y",),
        limits=_LIMITS,
        compute=compute,
        naive=naive,
        autograd=AUTOGRAD,
        function="grouped_matmul",
        forms=(
            Form(
                "groups of rows",
                {"x": ("M K",), "weight": ("G K N",), "group_list": "G"},
                {"split_item": 3, "group_type": 0},
            ),
            Form(
                "groups along the inner dim",
                {"x": ("K M",), "weight": ("K N",), "group_list": "G"},
                {"split_item": 3, "group_type": 2, "transpose_x": True},
            ),
        ),
        doc="ops-transformer gmm/grouped_matmul: docs/aclnnGroupedMatmulV4.md, tables of "
        "dtypes per case and of groupType; op_host/grouped_matmul_def.cpp",
    )
)
