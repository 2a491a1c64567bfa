"""GroupedMatmul: one matrix product per group (non-quantised).

| group_type | x                 | weight                        | split_item | y                  |
|------------|-------------------|-------------------------------|------------|--------------------|
| -1 (none)  | G of ``[M_i, K_i]``| G of ``[K_i, N_i]``          | 0, 1       | G of ``[M_i, N_i]``|
| 0 (rows)   | ``[M, K]``        | ``[G, K, N]`` or G of ``[K, N]``| 2, 3     | ``[M, N]``         |
| 0 (rows)   | G of ``[M_i, K]`` | G of ``[K, N]``               | 2, 3       | ``[sum M_i, N]``   |
| 2 (inner)  | ``[K, M]``, transposed | ``[K, N]``               | 2, 3       | ``[G, M, N]``      |

``group_list`` (int64 ``[G]``) holds the running sum (``group_list_type=0``) or the size (1) of the
groups along the grouped axis. Rows of y beyond the last group are not computed: they are NaN here.
``group_type=2`` is the weight gradient of ``group_type=0``; the product of an empty group is 0.
``transpose_weight`` reads weights as ``[N, K]``. Sums are fp32, with one rounding after the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from moe_graph.ops.defs.products.group_lists import COUNT, CUMSUM, INNER, ROWS, UNGROUPED
from moe_graph.ops.defs.products.grouped_matmul_autograd import AUTOGRAD
from moe_graph.ops.defs.products.grouped_matmul_kernel import compute, naive
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown
from moe_graph.ops.limit import Limit, dim
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Form,
    Input,
    OpDef,
    Output,
    Specs,
    TensorSpec,
    show_shape,
)
from moe_graph.ops.registry import register

MAX_GROUPS, MAX_TENSORS = 1024, 128
LAST_DIM_END = 65536

_QUANT_INPUTS = ("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale")


def _shapes(op: Call) -> Specs:
    _check_common(op)
    group_type = op.expect_one_of("group_type", (UNGROUPED, ROWS, INNER))
    rules = {UNGROUPED: _shapes_ungrouped, ROWS: _shapes_rows, INNER: _shapes_inner}
    specs = rules[group_type](op)
    _check_bias(op)
    return specs


def _check_common(op: Call) -> None:
    for name in _QUANT_INPUTS:
        if getattr(op, name):
            raise op.error(name, got="a tensor", want="nothing: only non-quantised products")
    op.expect_one_of("act_type", (0,))
    op.expect_one_of("group_list_type", (CUMSUM, COUNT))
    for name in ("x", "weight"):
        if not getattr(op, name):
            raise op.error(name, got="no tensor", want="one or more")
    for name in ("x", "weight"):
        for spec in getattr(op, name):
            if not spec.rank_known:
                raise op.error(name, got="a tensor of unknown rank", want="2 or 3 dimensions")


def _shapes_ungrouped(op: Call) -> Specs:
    _expect_split_item(op, (0, 1))
    _expect_no_transposed_x(op)
    if op.group_list is not None:
        raise op.error("group_list", got="a tensor", want="nothing for group_type -1")
    _expect_length(op, "x", len(op.weight))
    specs: Specs = []
    for x, weight in zip(op.x, op.weight, strict=True):
        rows, inner = _matrix(op, "x", x)
        weight_inner, columns = _weight_matrix(op, weight)
        op.expect_equal("weight", weight_inner, inner, "inner dim")
        specs.append(TensorSpec((rows, columns), x.dtype))
    return specs


def _shapes_rows(op: Call) -> Specs:
    _expect_split_item(op, (2, 3))
    _expect_no_transposed_x(op)
    rows: Dim = 0
    for x in op.x:
        part, inner = _matrix(op, "x", x)
        rows = UNKNOWN if is_unknown(part) or is_unknown(rows) else rows + part
    groups, weights = _weights(op)
    if len(op.x) > 1:
        _expect_length(op, "x", len(op.weight))
    if op.group_list is None:
        if len(op.x) == 1:
            raise op.error("group_list", got="nothing", want="a tensor for one x and group_type 0")
    else:
        op.expect_equal("group_list", op.dims("group_list", rank=1)[0], groups, "dim 0")
    for x in op.x:
        inner = x.shape[1]
        for weight_inner, _ in weights:
            op.expect_equal("weight", weight_inner, inner, "inner dim")
    columns = weights[0][1]
    for _, other in weights:
        op.expect_equal("weight", other, columns, "columns")
    return [TensorSpec((rows, columns), op.x[0].dtype)]


def _shapes_inner(op: Call) -> Specs:
    _expect_split_item(op, (2, 3))
    _expect_length(op, "x", 1)
    _expect_length(op, "weight", 1)
    for name, wanted in (("transpose_x", True), ("transpose_weight", False)):
        if getattr(op, name) is not wanted:
            raise op.error(name, got=not wanted, want=f"{wanted} for group_type 2")
    if op.bias:
        raise op.error("bias", got="a tensor", want="nothing for group_type 2")
    if op.group_list is None:
        raise op.error("group_list", got="nothing", want="a tensor for group_type 2")
    (groups,) = op.dims("group_list", rank=1)
    inner, rows = _matrix(op, "x", op.x[0])
    weight_inner, columns = _matrix(op, "weight", op.weight[0])
    op.expect_equal("weight", weight_inner, inner, "dim 0")
    return [TensorSpec((groups, rows, columns), op.x[0].dtype)]


def _matrix(op: Call, argument: str, spec: TensorSpec) -> tuple[Dim, Dim]:
    if len(spec.shape) != 2:
        raise op.error(argument, got=f"shape {show_shape(spec.shape)}", want="2 dimensions")
    return spec.shape[0], spec.shape[1]


def _weight_matrix(op: Call, spec: TensorSpec) -> tuple[Dim, Dim]:
    """Return (inner, columns) of a 2-D weight."""
    first, second = _matrix(op, "weight", spec)
    return (second, first) if op.transpose_weight else (first, second)


def _weights(op: Call) -> tuple[Dim, list[tuple[Dim, Dim]]]:
    """Return the number of groups and (inner, columns) of each weight tensor."""
    if len(op.weight) > 1 or len(op.x) > 1:
        return len(op.weight), [_weight_matrix(op, weight) for weight in op.weight]
    (weight,) = op.weight
    if len(weight.shape) != 3:
        raise op.error("weight", got=f"shape {show_shape(weight.shape)}", want="3 dimensions")
    groups, first, second = weight.shape
    return groups, [(second, first) if op.transpose_weight else (first, second)]


def _expect_split_item(op: Call, allowed: tuple[int, int]) -> None:
    if op.split_item not in allowed:
        raise op.error(
            "split_item",
            got=op.split_item,
            want=f"{allowed[0]} or {allowed[1]} for group_type {op.group_type}",
        )


def _expect_no_transposed_x(op: Call) -> None:
    if op.transpose_x:
        raise op.error("transpose_x", got=True, want=f"False for group_type {op.group_type}")


def _expect_length(op: Call, argument: str, length: int) -> None:
    tensors = getattr(op, argument)
    if len(tensors) != length:
        raise op.error(argument, got=f"{len(tensors)} tensors", want=length)


def _check_bias(op: Call) -> None:
    """Bias is one ``[G, N]`` beside one weight, and G of ``[N]`` beside G weights."""
    if not op.bias:
        return
    _expect_length(op, "bias", len(op.weight))
    for bias, weight in zip(op.bias, op.weight, strict=True):
        stacked = len(weight.shape) == 3
        columns = weight.shape[-2] if op.transpose_weight else weight.shape[-1]
        wanted = (weight.shape[0], columns) if stacked else (columns,)
        if len(bias.shape) != len(wanted):
            raise op.error("bias", got=f"shape {show_shape(bias.shape)}", want=show_shape(wanted))
        for position, (got, want) in enumerate(zip(bias.shape, wanted, strict=True)):
            op.expect_equal("bias", got, want, f"dim {position}")


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


_SOURCE = "aclnnGroupedMatmul page"
_LIMITS = (
    Limit("x", "tensors of x", lambda op: len(op.x), _SOURCE, high=MAX_TENSORS),
    Limit("weight", "tensors of weight", lambda op: len(op.weight), _SOURCE, high=MAX_TENSORS),
    Limit("x", "last dim of x", _largest_last_dim("x"), _SOURCE, high=LAST_DIM_END - 1),
    Limit(
        "weight", "last dim of weight", _largest_last_dim("weight"), _SOURCE, high=LAST_DIM_END - 1
    ),
    Limit("group_list", "groups of one weight", _groups("one weight"), _SOURCE, high=MAX_GROUPS),
    Limit(
        "group_list", "groups of a list of weights", _groups("a list"), _SOURCE, high=MAX_TENSORS
    ),
)

_X = (torch.float16, torch.bfloat16, torch.float32)
_BIAS = (torch.float16, torch.float32, torch.float32)
_X_950 = (*_X, torch.float16, torch.bfloat16)
_BIAS_950 = (*_BIAS, torch.float32, torch.bfloat16)

OPDEF = register(
    OpDef(
        ge_type="GroupedMatmul",
        inputs=(
            Input("x", _X, "dynamic", _X_950),
            Input("weight", _X, "dynamic", _X_950),
            Input("bias", _BIAS, "dynamic", _BIAS_950),
            Input("scale", (torch.float32,), "dynamic"),
            Input("offset", (torch.float32,), "dynamic"),
            Input("antiquant_scale", (torch.float16,), "dynamic"),
            Input("antiquant_offset", (torch.float16,), "dynamic"),
            Input("group_list", (torch.int64,), "optional"),
            Input("per_token_scale", (torch.float32,), "optional"),
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
        doc="ops-transformer gmm/grouped_matmul: docs/aclnnGroupedMatmulV4.md, tables of the "
        "non-quantised case and of groupType",
    )
)
