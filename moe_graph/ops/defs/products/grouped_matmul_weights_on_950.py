"""Shapes of GroupedMatmul on Ascend 950 where only, or more finely, the weight is quantised.

    x, weight        antiquant_scale                       beside it
    float, 8 bits    [G, N], in lists [N]                  int8: antiquant_offset alike
    float, int4      [G, N] or [G, K/S, N]                 antiquant_offset alike
    float, float4    [G, K/32, N]
    float8, float4   [G, K/64, N, 2]                       per_token_scale [M, K/64, 2]
    int8, int4       [G, K/S, N], S 128, 192, 256, 512     scale [G, N], per_token_scale [M]

``K/S`` or ``K/64`` and N swap where the weight is transposed. 32-bit weights hold eight of 4 bits
along their last dim.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.products.group_lists import ROWS, UNGROUPED
from moe_graph.ops.defs.products.grouped_matmul_dtypes import (
    FP4,
    FP8,
    HALVES,
    I4,
    I8,
    Kind,
    is_given,
    y_dtype,
)
from moe_graph.ops.defs.products.grouped_matmul_on_950 import (
    expect_one_x_and_weight,
    expect_positive,
    product_dims,
)
from moe_graph.ops.defs.products.grouped_matmul_scales import (
    ANTIQUANT,
    expect_absent,
    expect_given,
    expect_multiple,
    group_size,
)
from moe_graph.ops.defs.products.grouped_matmul_shapes import (
    check_per_column,
    expect_length,
    expect_no_transposed_x,
    expect_shape,
    shapes,
)
from moe_graph.ops.dims import Dim, floordiv, is_unknown, mul
from moe_graph.ops.opdef import Call, Specs, TensorSpec, show_shape

PER_32_BITS = 8
INT4_GROUPS, A8W4_GROUPS, MX_GROUPS = (32, 64, 128, 256), (128, 192, 256, 512), (32,)
ALIGNED = 64


def _is_4_bit(op: Call, dtype: torch.dtype) -> bool:
    """True for weights of this 4-bit dtype, in the open or eight to a 32-bit element."""
    packed = torch.int32 if dtype is I4 else torch.float32
    return op.weight[0].dtype in (dtype, packed)


def shapes_of_weight_quantised(op: Call) -> Specs:
    """Check a product with a quantised weight on Ascend 950 and return the specs of y."""
    op.expect_one_of("group_type", (UNGROUPED, ROWS))
    expect_absent(op, ("offset",), Kind.WEIGHT)
    expect_given(op, "antiquant_scale", Kind.WEIGHT)
    x = op.x[0].dtype
    expect_multiple(op, 2)
    if x in HALVES:
        expect_absent(op, ("scale", "per_token_scale"), Kind.WEIGHT)
    if _is_4_bit(op, FP4) or op.weight[0].dtype in FP8 or x is I8:
        expect_absent(op, ("antiquant_offset",), Kind.WEIGHT)
    if op.group_type == UNGROUPED:
        return _shapes_of_lists(op)
    groups = expect_one_x_and_weight(op)
    expect_no_transposed_x(op)
    inner, columns = _unpacked(op)
    op.expect_equal("weight", inner, product_dims(op)[1], "inner dim")
    for size in (inner, columns):
        expect_positive(op, "weight", size)
    if op.bias:
        expect_length(op, "bias", 1)
        expect_shape(op, "bias", op.bias[0], (groups, columns))
    _check_scales(op, groups, inner, columns)
    return [TensorSpec((product_dims(op)[0], columns), y_dtype(op))]


def _shapes_of_lists(op: Call) -> Specs:
    if op.x[0].dtype not in HALVES or op.weight[0].dtype not in (I8, I4):
        raise op.error("group_type", got=UNGROUPED, want="0 for these dtypes of x and weight")
    specs = shapes(op)
    for name in ANTIQUANT:
        if getattr(op, name):
            if op.weight[0].dtype is I8:
                check_per_column(op, name)
            expect_length(op, name, len(op.weight))
    if op.weight[0].dtype is I4:
        for index, weight in enumerate(op.weight):
            first, second = weight.shape
            inner, columns = (second, first) if op.transpose_weight else (first, second)
            _check_int4(op, index, inner, (), columns)
    return specs


def _unpacked(op: Call) -> tuple[Dim, Dim]:
    """Return K and N of the weight, of the 4-bit elements where it is packed."""
    _, of_x, inner, columns = product_dims(op)
    if op.weight[0].dtype not in (torch.int32, torch.float32):
        return inner, columns
    along_inner = op.transpose_weight or (
        not is_unknown(inner) and not is_unknown(of_x) and bool(mul(inner, PER_32_BITS) == of_x)
    )
    if along_inner:
        return mul(inner, PER_32_BITS), columns
    return inner, mul(columns, PER_32_BITS)


def _check_scales(op: Call, groups: Dim, inner: Dim, columns: Dim) -> None:
    x = op.x[0].dtype
    if x not in HALVES or _is_4_bit(op, FP4):
        for size in (inner, columns):
            if isinstance(size, int) and not is_unknown(size) and size % ALIGNED:
                raise op.error("weight", got=f"a dim of {size}", want=f"a multiple of {ALIGNED}")
    if x in FP8:
        _check_float8_by_float4(op, groups, inner, columns)
    elif x is I8:
        _check_grouped(op, op.antiquant_scale, groups, inner, columns, A8W4_GROUPS)
        _check_int8_by_int4(op, groups, columns)
    elif _is_4_bit(op, FP4):
        _check_grouped(op, op.antiquant_scale, groups, inner, columns, MX_GROUPS)
    elif _is_4_bit(op, I4):
        _check_int4(op, 0, inner, (groups,), columns)
    else:
        for name in ANTIQUANT:
            if getattr(op, name):
                expect_length(op, name, 1)
                expect_shape(op, name, getattr(op, name)[0], (groups, columns))


def _check_int4(op: Call, index: int, inner: Dim, stack: tuple[Dim, ...], columns: Dim) -> None:
    """Check scale and offset of int4 weights, per column or per group of rows."""
    for name in ANTIQUANT:
        tensors = getattr(op, name)
        if not tensors:
            continue
        expect_length(op, name, len(op.weight))
        if len(tensors[index].shape) == len(stack) + 2:
            along_k = tensors[index].shape[-1 if op.transpose_weight else -2]
            if isinstance(along_k, int) and along_k == 1:
                raise op.error(name, got="one group of rows", want="2 or more, or no dim of groups")
            _check_groups_of(op, name, tensors[index], stack, inner, columns, INT4_GROUPS)
        else:
            expect_shape(op, name, tensors[index], (*stack, columns))
    if op.antiquant_offset:
        scale, offset = op.antiquant_scale[index], op.antiquant_offset[index]
        expect_shape(op, "antiquant_offset", offset, scale.shape)


def check_float8_weight(op: Call) -> None:
    """Raise when the op runs with a float8 weight beside float rows that is not transposed."""
    if op.weight[0].dtype in FP8 and not op.transpose_weight:
        raise op.error("transpose_weight", got=False, want="True for a float8 weight")


def _check_grouped(
    op: Call,
    scales: list[TensorSpec],
    groups: Dim,
    inner: Dim,
    columns: Dim,
    sizes: tuple[int, ...],
) -> None:
    expect_length(op, "antiquant_scale", 1)
    _check_groups_of(op, "antiquant_scale", scales[0], (groups,), inner, columns, sizes)


def _check_groups_of(
    op: Call,
    name: str,
    tensor: TensorSpec,
    stack: tuple[Dim, ...],
    inner: Dim,
    columns: Dim,
    sizes: tuple[int, ...],
) -> None:
    """Raise unless a tensor is ``[.., K/S, N]``, transposed with the weight, for S in `sizes`."""
    if len(tensor.shape) != len(stack) + 2:
        raise op.error(
            name, got=f"shape {show_shape(tensor.shape)}", want=f"{len(stack) + 2} dimensions"
        )
    along_k = tensor.shape[-1] if op.transpose_weight else tensor.shape[-2]
    middle = (columns, along_k) if op.transpose_weight else (along_k, columns)
    expect_shape(op, name, tensor, (*stack, *middle))
    size = group_size(op, name, inner, along_k)
    if size != -1 and size not in sizes:
        wanted = " or ".join(map(str, sizes))
        raise op.error(name, got=f"groups of {size} rows", want=wanted)


def _check_float8_by_float4(op: Call, groups: Dim, inner: Dim, columns: Dim) -> None:
    expect_absent(op, ("scale",), Kind.WEIGHT)
    expect_length(op, "antiquant_scale", 1)
    blocks = floordiv(inner, ALIGNED)
    middle = (columns, blocks) if op.transpose_weight else (blocks, columns)
    expect_shape(op, "antiquant_scale", op.antiquant_scale[0], (groups, *middle, 2))
    expect_given(op, "per_token_scale", Kind.WEIGHT)
    rows = product_dims(op)[0]
    expect_shape(op, "per_token_scale", op.per_token_scale, (rows, blocks, 2))


def _check_int8_by_int4(op: Call, groups: Dim, columns: Dim) -> None:
    expect_given(op, "scale", Kind.WEIGHT)
    expect_length(op, "scale", 1)
    expect_shape(op, "scale", op.scale[0], (groups, columns))
    if not is_given(op.per_token_scale):
        raise op.error("per_token_scale", got="nothing", want="a tensor for int8 x")
    expect_shape(op, "per_token_scale", op.per_token_scale, (product_dims(op)[0],))
