"""Scales and offsets of quantised GroupedMatmul on A2 and A3.

    x, weight     needs                                             may have
    int8, int8    scale [G, N] (not for int32 y)                    per_token_scale [M]
    int8, int4    scale [G, K/256, N], bias [G, N],                 offset [G, 1, N], and then
                  per_token_scale [M]                               scale [G, 1, N]
    int4, int4    scale [G, N] or [G, K/S, N]                       per_token_scale [M]
    float, int8   antiquant_scale and antiquant_offset [G, N]
    float, int4   antiquant_scale [G, N] or [G, K/S, N]             antiquant_offset alike

Beside a list of weights each tensor lacks the G. S is the number of rows that share a scale.
"""

from __future__ import annotations

from moe_graph.ops.defs.products.group_lists import INNER
from moe_graph.ops.defs.products.grouped_matmul_dtypes import I4, Kind, is_given, kind
from moe_graph.ops.defs.products.grouped_matmul_shapes import (
    check_per_column,
    expect_length,
    expect_shape,
    inner_and_columns,
)
from moe_graph.ops.dims import Dim, is_unknown, known_less
from moe_graph.ops.opdef import Call, TensorSpec, show_shape

INT32 = 2  # attribute dtype
MAX_A8W4_INNER = 18432
QUANT = ("scale", "offset", "per_token_scale")
ANTIQUANT = ("antiquant_scale", "antiquant_offset")


def check_scales(op: Call) -> None:
    """Check which scales and offsets a product on A2 or A3 has, and their shapes."""
    what = kind(op)
    if what is Kind.PLAIN:
        expect_absent(op, (*QUANT, *ANTIQUANT), what)
        return
    expect_multiple(op, 2)
    if op.group_type == INNER:
        raise op.error("group_type", got=INNER, want=f"-1 or 0 for {what.value} products")
    if what is Kind.WEIGHT:
        _check_weight_only(op)
    elif what is Kind.A8W4:
        _check_a8w4(op)
    else:
        _check_full(op)


def expect_absent(op: Call, names: tuple[str, ...], what: Kind) -> None:
    """Raise when an input that products of this kind do not have is given."""
    for name in names:
        value = getattr(op, name)
        if value if isinstance(value, list) else is_given(value):
            raise op.error(name, got="a tensor", want=f"nothing for {what.value} products")


def expect_given(op: Call, name: str, what: Kind) -> None:
    """Raise when an input that products of this kind need is absent."""
    value = getattr(op, name)
    if not (value if isinstance(value, list) else is_given(value)):
        raise op.error(name, got="nothing", want=f"a tensor for {what.value} products")


def _check_full(op: Call) -> None:
    expect_absent(op, ("offset", *ANTIQUANT), Kind.FULL)
    if op.dtype != INT32:
        expect_given(op, "scale", Kind.FULL)
        if op.x[0].dtype is I4:
            _check_per_group(op, "scale")
        else:
            check_per_column(op, "scale")
    if op.per_token_scale is not None:
        _check_per_token(op)


def _check_per_token(op: Call) -> None:
    for name in ("x", "weight"):
        expect_length(op, name, 1)
    expect_shape(op, "per_token_scale", op.per_token_scale, (op.x[0].shape[0],))


def _check_a8w4(op: Call) -> None:
    expect_absent(op, ANTIQUANT, Kind.A8W4)
    if not op.offset:
        return
    for name in ("bias", "scale"):
        expect_given(op, name, Kind.A8W4)
    (weight,) = op.weight
    for name in ("offset", "scale"):
        expect_length(op, name, 1)
        wanted = (weight.shape[0], 1, inner_and_columns(op, weight)[1])
        expect_shape(op, name, getattr(op, name)[0], wanted)


def _check_weight_only(op: Call) -> None:
    expect_absent(op, QUANT, Kind.WEIGHT)
    expect_given(op, "antiquant_scale", Kind.WEIGHT)
    int4 = op.weight[0].dtype is I4
    if not int4:
        expect_given(op, "antiquant_offset", Kind.WEIGHT)
    for name in ANTIQUANT:
        if getattr(op, name):
            (_check_per_group if int4 else check_per_column)(op, name)
    if int4 and op.antiquant_offset:
        for scale, offset in zip(op.antiquant_scale, op.antiquant_offset, strict=True):
            expect_shape(op, "antiquant_offset", offset, scale.shape)


def _check_per_group(op: Call, name: str) -> None:
    """Raise unless a list is per column, or has a row for every S rows of its weight."""
    tensors: list[TensorSpec] = getattr(op, name)
    expect_length(op, name, len(op.weight))
    sizes: list[Dim] = []
    for tensor, weight in zip(tensors, op.weight, strict=True):
        if len(tensor.shape) != len(weight.shape):
            check_per_column(op, name)
            continue
        inner, columns = inner_and_columns(op, weight)
        groups = tensor.shape[-2]
        expect_shape(op, name, tensor, (*weight.shape[:-2], groups, columns))
        sizes.append(size := group_size(op, name, inner, groups))
        if op.transpose_weight and isinstance(size, int) and size % 2:
            raise op.error(name, got=f"groups of {size} rows", want="an even number of rows")
    for size in sizes:
        op.expect_equal(name, size, sizes[0], "rows of a group")


def group_size(op: Call, name: str, inner: Dim, groups: Dim) -> Dim:
    """Return how many of `inner` rows share a scale; -1 where it is not known.

    Raises:
        OpError: the groups do not divide the rows.
    """
    if not isinstance(inner, int) or not isinstance(groups, int):
        return -1
    if is_unknown(inner) or is_unknown(groups):
        return -1
    if groups <= 0 or inner % groups:
        raise op.error(
            name, got=f"{groups} groups", want=f"a divisor of {inner}, the rows of weight"
        )
    return inner // groups


def expect_multiple(op: Call, factor: int) -> None:
    """Raise when the last dim of a 4-bit weight is known to be no multiple of `factor`."""
    for weight in op.weight:
        last = weight.shape[-1]
        if weight.dtype is I4 and isinstance(last, int) and last % factor and not is_unknown(last):
            raise op.error("weight", got=f"last dim {last}", want=f"a multiple of {factor}")


def check_when_run(op: Call) -> None:
    """Check what the pages ask of 4-bit weights beyond infershape on A2 and A3."""
    what = kind(op)
    if what is Kind.A8W4:
        _check_running_a8w4(op)
    if what in (Kind.A8W4, Kind.FULL):
        expect_multiple(op, 8)
        if op.weight[0].dtype is I4 and op.transpose_weight:
            raise op.error("transpose_weight", got=True, want=f"False for {what.value} products")


def _check_running_a8w4(op: Call) -> None:
    for name in ("bias", "scale", "per_token_scale"):
        expect_given(op, name, Kind.A8W4)
    _check_per_token(op)
    if op.offset:
        return
    inner, columns = inner_and_columns(op, op.weight[0])
    scale = op.scale[0]
    if len(scale.shape) != 3:
        raise op.error("scale", got=f"shape {show_shape(scale.shape)}", want="3 dimensions")
    expect_shape(op, "scale", scale, (op.weight[0].shape[0], scale.shape[1], columns))
    size = group_size(op, "scale", inner, scale.shape[1])
    op.expect_equal("scale", size, 256, "rows of a group")
    if known_less(MAX_A8W4_INNER, inner):
        raise op.error("x", got=f"K = {inner}", want=f"<= {MAX_A8W4_INNER}", limit=True)
