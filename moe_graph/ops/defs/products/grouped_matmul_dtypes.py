"""Dtypes of GroupedMatmul: one row per combination that the documents list for a product.

    PLAIN    x and weight alike                 y as x
    FULL     x and weight quantised alike       y = (x @ w + bias) * scale [* per_token_scale]
    A8W4     int8 rows, int4 weights (A2, A3)   y = ((x - 8) @ w * scale + bias) * per_token_scale
    WEIGHT   only the weights are quantised     y = x @ ((w + offset) * antiquant_scale) + bias

The rows are those of the tables of the aclnnGroupedMatmulV4 page and of the op's definition.
PyTorch has no hifloat8. A 32-bit weight beside a narrower x holds eight weights of 4 bits each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, Final

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.products.group_lists import INNER, ROWS, UNGROUPED
from moe_graph.ops.ir import dtype_name
from moe_graph.ops.opdef import Call

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
I8, I32, I64, U64 = torch.int8, torch.int32, torch.int64, torch.uint64
I4: torch.dtype = torch.int4  # type: ignore[attr-defined]
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (F16, BF16)

Dtypes = tuple[torch.dtype, ...]
OUTPUT_DTYPES: Final = {-1: I8, 0: F16, 1: BF16, 2: I32, 3: F32}
"""The attribute ``dtype`` of a quantised product."""


class Kind(Enum):
    """What is quantised, as the dtypes of x and weight tell."""

    PLAIN = "non-quantised"
    FULL = "quantised"
    A8W4 = "int8 by int4"
    WEIGHT = "weight-quantised"


@dataclass(frozen=True)
class Row:
    """One combination; an input whose dtypes are empty is absent.

    Attributes:
        x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale: dtypes
            of the inputs of these names.
        y: dtypes of the output.
        group_types: values of ``group_type``.
    """

    x: Dtypes
    weight: Dtypes
    y: Dtypes
    bias: Dtypes = ()
    scale: Dtypes = ()
    offset: Dtypes = ()
    antiquant_scale: Dtypes = ()
    antiquant_offset: Dtypes = ()
    per_token_scale: Dtypes = ()
    group_types: tuple[int, ...] = (ROWS,)


def _plain(dtype: torch.dtype, bias: Dtypes) -> Row:
    return Row((dtype,), (dtype,), (dtype,), bias, group_types=(UNGROUPED, ROWS, INNER))


def _weight(x: torch.dtype, weight: Dtypes, bias: Dtypes, **others: Any) -> Row:
    return Row((x,), weight, (x,), bias, **others)


_A2_ROWS: Final = (
    _plain(F16, (F16,)),
    _plain(BF16, (F32,)),
    _plain(F32, (F32,)),
    Row((I8,), (I8,), (I8,), (I32,), (U64,)),
    Row((I8,), (I8,), (BF16,), (I32, BF16), (BF16,), per_token_scale=(F32,)),
    Row((I8,), (I8,), (BF16,), (BF16,), (F32,), per_token_scale=(F32,)),
    Row((I8,), (I8,), (F16,), (I32,), (F32,), per_token_scale=(F32,)),
    Row((I8,), (I8,), (I32,), (I32,)),
    Row((I8,), (I4,), HALVES, (F32,), (U64,), (F32,), per_token_scale=(F32,)),
    Row((I4,), (I4,), HALVES, scale=(U64,), per_token_scale=(F32,)),
    *(
        _weight(
            x,
            (I8, I4),
            bias,
            antiquant_scale=(x,),
            antiquant_offset=(x,),
            group_types=(UNGROUPED, ROWS),
        )
        for x, bias in ((F16, (F16,)), (BF16, (F32,)))
    ),
)
_950_ROWS: Final = (
    _plain(F16, (F16, F32)),
    _plain(BF16, (BF16, F32)),
    _plain(F32, (F32,)),
    Row((I8,), (I8,), (BF16, F16, I8, I32), (I32,), (U64, I64)),
    Row((I8,), (I8,), (I32,), (I32,)),
    Row((I8,), (I8,), (BF16,), (I32, BF16, F32), (BF16, F32), per_token_scale=(F32,)),
    Row((I8,), (I8,), (F16,), (I32, F16, F32), (F32,), per_token_scale=(F32,)),
    Row(FP8, FP8, (*HALVES, F32), scale=(U64, I64)),
    *(
        Row(FP8, FP8, (*HALVES, F32), scale=(s,), per_token_scale=(s,), group_types=(ROWS, INNER))
        for s in (F32, E8M0)
    ),
    Row((FP4,), (FP4,), (*HALVES, F32), (F32,), (E8M0,), per_token_scale=(E8M0,)),
    *(
        row
        for x, bias in ((F16, (F16,)), (BF16, (BF16, F32)))
        for row in (
            _weight(
                x,
                (I8, I4, I32),
                bias,
                antiquant_scale=(x,),
                antiquant_offset=(x,),
                group_types=(UNGROUPED, ROWS),
            ),
            _weight(x, FP8, bias, antiquant_scale=(x,)),
            _weight(x, (FP4, F32), bias, antiquant_scale=(E8M0,)),
        )
    ),
    Row(
        (torch.float8_e4m3fn,),
        (FP4, F32),
        HALVES,
        HALVES,
        antiquant_scale=(E8M0,),
        per_token_scale=(E8M0,),
    ),
    Row((I8,), (I4, I32), HALVES, (F32,), (F32,), antiquant_scale=(F16,), per_token_scale=(F32,)),
)
_QUANT_INPUTS = ("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale")
_INPUTS = ("x", "weight", "bias", *_QUANT_INPUTS)
_PLACEHOLDERS = {"antiquant_scale": F16, "antiquant_offset": F16}
"""Dtypes of the empty tensors that stand for absent inputs; the others are float32."""


def rows(soc: Soc) -> tuple[Row, ...]:
    """Return the combinations of `soc`."""
    return _950_ROWS if soc is Soc.ASCEND950 else _A2_ROWS


def columns(name: str, soc: Soc) -> Dtypes:
    """Return the dtype columns of the IR input `name`."""
    return tuple(
        column[_INPUTS.index(name)]
        for row in rows(soc)
        for column in product(
            *(getattr(row, each) or (_PLACEHOLDERS.get(each, F32),) for each in _INPUTS)
        )
    )


def kind(op: Call) -> Kind:
    """Return what is quantised, as the first x and the first weight tell."""
    x, weight = op.x[0].dtype, op.weight[0].dtype
    if x is I8 and weight is I4 and op.soc is not Soc.ASCEND950:
        return Kind.A8W4
    if x in (I4, FP4) or (_bits(x) == 8 and _bits(weight) == 8):
        return Kind.FULL
    return Kind.PLAIN if _bits(x) == _bits(weight) else Kind.WEIGHT


def _bits(dtype: torch.dtype) -> int:
    return 4 if dtype in (I4, FP4) else 8 * dtype.itemsize


def y_dtype(op: Call) -> torch.dtype:
    """Return the dtype of y: that of x, or for a quantised product what attribute `dtype` says.

    Raises:
        OpError: the attribute is no number of a dtype.
    """
    of_x: torch.dtype = op.x[0].dtype
    if kind(op) is Kind.PLAIN or (kind(op) is Kind.WEIGHT and op.soc is not Soc.ASCEND950):
        return of_x
    return OUTPUT_DTYPES[op.expect_one_of("dtype", tuple(OUTPUT_DTYPES))]


def check_dtypes(op: Call) -> None:
    """Raise unless one row has the dtypes of all inputs and of y, and this ``group_type``.

    Raises:
        OpError: about the first input, in IR order, that no row has beside those before it.
    """
    if not op.x or not op.weight:
        return
    left = list(rows(op.soc))
    for name in _INPUTS:
        given = getattr(op, name)
        for spec in given if isinstance(given, list) else [given] if is_given(given) else []:
            found = [row for row in left if spec.dtype in getattr(row, name)]
            left = _narrowed(op, name, left, found, dtype_name(spec.dtype))
    y = y_dtype(op)
    left = _narrowed(op, "dtype", left, [r for r in left if y in r.y], f"y {dtype_name(y)}")
    found = [row for row in left if op.group_type in row.group_types]
    _narrowed(op, "group_type", left, found, str(op.group_type))


def _narrowed(op: Call, name: str, left: list[Row], found: list[Row], got: str) -> list[Row]:
    """Return `found`, unless it is empty."""
    if not found:
        raise op.error(
            name,
            got=got,
            want=_choices(name, left),
            hint=f"x is {dtype_name(op.x[0].dtype)}, weight {dtype_name(op.weight[0].dtype)}",
            limit=True,
        )
    return found


def _choices(name: str, left: list[Row]) -> str:
    attribute = {"dtype": "y", "group_type": "group_types"}.get(name, name)
    values = dict.fromkeys(value for row in left for value in getattr(row, attribute))
    shown = [dtype_name(v) if isinstance(v, torch.dtype) else str(v) for v in values]
    return " or ".join(shown) or "nothing beside the dtypes of the inputs before it"


def is_given(tensor: Any) -> bool:
    """True unless an optional input is absent, for which an empty ``[0]`` stands too."""
    if tensor is None or len(tensor.shape) != 1:
        return tensor is not None
    (size,) = tensor.shape
    return not (isinstance(size, int) and size == 0)
