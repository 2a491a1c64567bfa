"""Shapes of quantised GroupedMatmul on Ascend 950: one x, one weight, groups of rows or inner.

    scale, per_token_scale of x [M, K], weight [G, K, N] (group_type 0) or [K, N] (2, y [G, M, N])
        per tensor or column   [G], [G, 1] or [G, N]      [M] (2: [G, M]), [G] or [G, 1]
        per block of 128       [G, K/128, N/128]          [M, K/128]
                               2: [K/128 + G, N/128]      [M, K/128 + G]
        mx, 32 of K            [G, K/64, N, 2]            [M, K/64, 2]
                               2: [K/64 + G, N, 2]        [K/64 + G, M, 2]

Quotients are rounded up, before ``+ G`` down. A transposed weight has a transposed scale. The
shapes of mx scales are checked when the op runs, the others by infershape. Products of which only
the weight is quantised stand in `grouped_matmul_weights_on_950.py`.
"""

from __future__ import annotations

from moe_graph.ops.defs.products.group_lists import INNER, ROWS, SPARSE
from moe_graph.ops.defs.products.grouped_matmul_dtypes import FP4, Kind, is_given, y_dtype
from moe_graph.ops.defs.products.grouped_matmul_scales import (
    ANTIQUANT,
    INT32,
    expect_absent,
    expect_given,
)
from moe_graph.ops.defs.products.grouped_matmul_shapes import (
    expect_length,
    expect_shape,
    expect_split_item,
    fits,
    inner_and_columns,
    list_length,
)
from moe_graph.ops.dims import Dim, ceildiv, floordiv, is_unknown
from moe_graph.ops.opdef import Call, Specs, TensorSpec, show_shape

BLOCK, MX = 128, 64


def shapes_of_quantised(op: Call) -> Specs:
    """Check a product of quantised x and weight on Ascend 950 and return the spec of y."""
    op.expect_one_of("group_type", (ROWS, INNER))
    groups = expect_one_x_and_weight(op)
    rows, inner, weight_inner, columns = product_dims(op)
    op.expect_equal("weight", weight_inner, inner, "inner dim")
    expect_positive(op, "weight", columns)
    expect_positive(op, *(("x", inner) if op.group_type == ROWS else ("x", rows)))
    if op.bias:
        expect_length(op, "bias", 1)
        expect_shape(op, "bias", op.bias[0], (groups, columns))
    expect_absent(op, ("offset", *ANTIQUANT), Kind.FULL)
    if op.scale or op.dtype != INT32:
        expect_given(op, "scale", Kind.FULL)
        expect_length(op, "scale", 1)
        _check_scales(op, groups)
    shape = (rows, columns) if op.group_type == ROWS else (groups, rows, columns)
    return [TensorSpec(shape, y_dtype(op))]


def expect_one_x_and_weight(op: Call) -> Dim:
    """Check lists of one tensor each and return the number of groups."""
    for name in ("x", "weight"):
        expect_length(op, name, 1)
    expect_split_item(op, (2, 3))
    if op.group_list is None:
        raise op.error("group_list", got="nothing", want="a tensor for one x and one weight")
    if op.group_list_type == SPARSE and op.group_type != ROWS:
        raise op.error("group_list_type", got=SPARSE, want="0 or 1 for group_type 2")
    groups = list_length(op)
    expect_positive(op, "group_list", groups)
    (x,), (weight,) = op.x, op.weight
    for name, spec, rank in (("x", x, 2), ("weight", weight, 3 if op.group_type == ROWS else 2)):
        if len(spec.shape) != rank:
            raise op.error(name, got=f"shape {show_shape(spec.shape)}", want=f"{rank} dimensions")
    if op.group_type == ROWS:
        op.expect_equal("weight", weight.shape[0], groups, "dim 0")
    return groups


def product_dims(op: Call) -> tuple[Dim, Dim, Dim, Dim]:
    """Return M and K of x, and K and N of weight."""
    first, second = op.x[0].shape
    rows, inner = (second, first) if op.transpose_x else (first, second)
    return (rows, inner, *inner_and_columns(op, op.weight[0]))


def expect_positive(op: Call, argument: str, size: Dim) -> None:
    """Raise when a dim is known to be 0."""
    if isinstance(size, int) and size == 0:
        raise op.error(
            argument, got="a dim of size 0", want="> 0 along an axis that is not grouped"
        )


def _check_scales(op: Call, groups: Dim) -> None:
    scale: TensorSpec = op.scale[0]
    if is_given(op.per_token_scale) and is_per_block(op, groups):
        _, k_blocks = _turned(op.per_token_scale.shape, op.transpose_x)
        wanted, _ = _turned(scale.shape[-2:], op.transpose_weight)
        op.expect_equal("per_token_scale", k_blocks, wanted, "blocks of K")
        return
    if len(scale.shape) in (3, 4):
        return  # mx
    columns = product_dims(op)[3]
    if not any(fits(scale, shape) for shape in ((groups,), (groups, 1), (groups, columns))):
        raise op.error(
            "scale",
            got=f"shape {show_shape(scale.shape)}",
            want=f"[{groups}], [{groups}, 1] or [{groups}, {columns}]",
        )
    if is_given(op.per_token_scale):
        _check_per_token(op, groups)


def is_per_block(op: Call, groups: Dim) -> bool:
    """True when the scales are those of blocks of 128: their shapes tell."""
    rows, _, inner, columns = product_dims(op)
    scale, weight, per_token = op.scale[0].shape, op.weight[0].shape, op.per_token_scale.shape
    if len(per_token) != 2 or len(scale) != len(weight):
        return False
    k_blocks, n_blocks = _turned(scale[-2:], op.transpose_weight)
    wanted = ceildiv(inner, BLOCK)
    if op.group_type == INNER:
        wanted = _plus(floordiv(inner, BLOCK), groups)
    pairs = (
        (_turned(per_token, op.transpose_x)[0], rows),
        (n_blocks, ceildiv(columns, BLOCK)),
        (k_blocks, wanted),
    )
    return all(not is_unknown(a) and not is_unknown(b) and bool(a == b) for a, b in pairs)


def _plus(a: Dim, b: Dim) -> Dim:
    return a if is_unknown(a) else b if is_unknown(b) else a + b


def _turned(shape: tuple[Dim, ...], transposed: bool) -> tuple[Dim, Dim]:
    first, second = shape
    return (second, first) if transposed else (first, second)


def _check_per_token(op: Call, groups: Dim) -> None:
    rows = product_dims(op)[0]
    per_tensor: list[tuple[Dim, ...]] = [(groups,), (groups, 1)]
    per_row = (rows,) if op.group_type == ROWS else (groups, rows)
    given: TensorSpec = op.per_token_scale
    if not any(fits(given, shape) for shape in (per_row, *per_tensor)):
        raise op.error(
            "per_token_scale",
            got=f"shape {show_shape(given.shape)}",
            want=f"{show_shape(per_row)}, [{groups}] or [{groups}, 1]",
        )


def check_mx(op: Call) -> None:
    """Check the shapes of mx scales: that of scale says whether they are mx."""
    if not op.scale or len(op.scale[0].shape) not in (3, 4):
        return
    groups = list_length(op)
    if is_given(op.per_token_scale) and is_per_block(op, groups):
        return
    expect_given(op, "per_token_scale", Kind.FULL)
    rows, _, inner, columns = product_dims(op)
    if op.x[0].dtype is FP4:
        _check_pairs(op, inner, columns)
    if op.group_type == INNER:
        blocks = _plus(floordiv(inner, MX), groups)
        scale: tuple[Dim, ...] = (blocks, columns, 2)
        per_token: tuple[Dim, ...] = (blocks, rows, 2)
    else:
        blocks = ceildiv(inner, MX)
        middle = (columns, blocks) if op.transpose_weight else (blocks, columns)
        scale, per_token = (groups, *middle, 2), (rows, blocks, 2)
    expect_shape(op, "scale", op.scale[0], scale)
    expect_shape(op, "per_token_scale", op.per_token_scale, per_token)


def _check_pairs(op: Call, inner: Dim, columns: Dim) -> None:
    """Two float4 share a byte along the last dim of x and of weight."""
    if isinstance(inner, int) and not is_unknown(inner) and (inner % 2 or inner == 2):
        raise op.error("x", got=f"K = {inner}", want="an even number above 2 for float4")
    odd = isinstance(columns, int) and not is_unknown(columns) and columns % 2
    if odd and not op.transpose_weight:
        raise op.error("weight", got=f"N = {columns}", want="an even number for float4")
