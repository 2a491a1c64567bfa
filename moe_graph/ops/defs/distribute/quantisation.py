"""What dispatch sends: the dtype of the rows for each ``quant_mode``, and of their scales.

    mode                   products  scales input           expand_x           dynamic_scales
    0 none                 all       none                   as x               unused
    0 none, x quantised    950       [BS, *] of the rows    as x               as scales, [A, *]
    1 static               950       [1], [H], [experts, H] int8               unused
    2 per token            all       none or [experts, H]   int8; 950: or fp8  float32 [A]
    3 per group of 128     950       none or [experts, H]   fp8                float32 [A, G]
    4 mx, 5 mx with clip   950       none                   fp8                float8_e8m0fnu [A, M]

G is ``ceil(H / 128)``, M is ``ceil(H / 32)`` rounded up to even, experts are the shared ones and
then the routed ones. hifloat8 has no dtype in PyTorch, and PyTorch packs two float4 into one
element, so rows of these dtypes have a shape here but are refused when the op runs.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import Dim, ceildiv, mul
from moe_graph.ops.ir import TensorSpec, dtype_name, show_shape
from moe_graph.ops.opdef import Call

NO_QUANT, STATIC, PER_TOKEN, PER_GROUP, MX, MX_CLIP = range(6)

UNDEFINED: Final = 28
"""``ge::DT_UNDEFINED``, the default of ``y_dtype``."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2
GE_DTYPES: Final[dict[int, torch.dtype]] = {
    1: torch.float16,
    2: torch.int8,
    27: torch.bfloat16,
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
    40: FP4,
}
"""``ge::DataType`` numbers of ``y_dtype`` that have a dtype in PyTorch."""

_Y_DTYPES: Final[dict[int, tuple[torch.dtype, ...]]] = {
    STATIC: (torch.int8,),
    PER_TOKEN: (torch.int8, *FP8),
    PER_GROUP: FP8,
    MX: (*FP8, FP4),
    MX_CLIP: FP8,
}
_QUANT_MODES: Final[dict[Soc, tuple[int, ...]]] = {
    Soc.A2: (NO_QUANT, PER_TOKEN),
    Soc.A3: (NO_QUANT, PER_TOKEN),
    Soc.ASCEND950: (NO_QUANT, STATIC, PER_TOKEN, PER_GROUP, MX, MX_CLIP),
}
_HALVES = (torch.float16, torch.bfloat16)


def expand_x_dtype(op: Call) -> torch.dtype:
    """Return the dtype of the rows.

    Rows that are quantised already keep their dtype; the public rule calls them int8.

    Raises:
        OpError: ``y_dtype`` is none that this quantisation gives (Ascend 950).
    """
    y_dtype = getattr(op, "y_dtype", UNDEFINED)
    if op.soc is Soc.ASCEND950 and y_dtype != UNDEFINED:
        dtype = GE_DTYPES.get(y_dtype)
        allowed = _Y_DTYPES.get(op.quant_mode)
        if dtype is None or (allowed is not None and dtype not in allowed):
            names = "a dtype of PyTorch" if allowed is None else _names(allowed)
            raise op.error(
                "y_dtype",
                got=f"ge::DataType {y_dtype}" + (f", {dtype_name(dtype)}" if dtype else ""),
                want=f"{names} with quant_mode={op.quant_mode}",
                limit=True,
            )
        return dtype
    if op.quant_mode != NO_QUANT:
        return torch.int8
    already_quantised = op.x.dtype not in _HALVES and not op.upstream
    return op.x.dtype if op.scales is None or already_quantised else torch.int8


def dynamic_scales(op: Call, rows: Dim, hidden: Dim) -> TensorSpec:
    """Return the spec of the scales that leave with `rows` rows of `hidden` elements."""
    if op.quant_mode == NO_QUANT and op.scales is not None:
        dtype = op.scales.dtype
    else:
        dtype = torch.float8_e8m0fnu if op.quant_mode in (MX, MX_CLIP) else torch.float32
    if op.soc is not Soc.ASCEND950:
        return TensorSpec((rows,), dtype, bounds=(0,))
    if op.quant_mode == PER_GROUP:
        return TensorSpec((rows, ceildiv(hidden, 128)), dtype, bounds=(0,))
    if op.quant_mode in (MX, MX_CLIP):
        even = mul(ceildiv(ceildiv(hidden, 32), 2), 2)
        return TensorSpec((rows, even), dtype, bounds=(0,))
    if op.quant_mode == NO_QUANT and op.scales is not None:
        return TensorSpec((rows, op.dims("scales", rank=2)[1]), dtype, bounds=(0,))
    return TensorSpec((rows,), dtype, bounds=(0,))


def check_quantisation(op: Call, expand_x: TensorSpec, scale_rows: int) -> None:
    """Check that ``quant_mode``, ``scales`` and the dtypes go together.

    Args:
        op: the call.
        expand_x: what leaves.
        scale_rows: rows of a matrix of smoothing scales: one per expert.

    Raises:
        OpError: they do not.
    """
    mode = op.quant_mode
    if mode not in _QUANT_MODES[op.soc]:
        wanted = "one of " + ", ".join(str(each) for each in _QUANT_MODES[op.soc])
        raise op.error("quant_mode", got=mode, want=wanted, limit=True)
    if expand_x.dtype is FP4 or op.x.dtype is FP4:
        raise op.error(
            "y_dtype",
            got=dtype_name(FP4),
            want="a dtype with one element per byte or more",
            hint="PyTorch packs two float4 into one element, which halves H",
        )
    if mode != NO_QUANT and op.x.dtype not in _HALVES:
        raise op.error("x", got=dtype_name(op.x.dtype), want=f"{_names(_HALVES)} to be quantised")
    if mode == NO_QUANT and expand_x.dtype != op.x.dtype and op.scales is None:
        raise op.error("y_dtype", got=dtype_name(expand_x.dtype), want=dtype_name(op.x.dtype))
    needs, takes = _takes_scales(op)
    if op.scales is None and needs:
        raise op.error("scales", got="nothing", want=f"a tensor with quant_mode={mode}")
    if op.scales is not None and not takes:
        raise op.error(
            "scales", got="a tensor", want=f"nothing with quant_mode={mode}, {op.x.dtype}"
        )
    if op.scales is not None:
        _check_scales(op, scale_rows)


def _takes_scales(op: Call) -> tuple[bool, bool]:
    """Return whether the mode needs scales, and whether it takes them."""
    if op.quant_mode == NO_QUANT:
        quantised = op.x.dtype not in _HALVES
        return quantised, quantised
    return op.quant_mode == STATIC, op.quant_mode in (STATIC, PER_TOKEN, PER_GROUP)


def _check_scales(op: Call, scale_rows: int) -> None:
    tokens, hidden = op.x.shape
    rank = len(op.scales.shape)
    if op.quant_mode == STATIC and rank == 1:
        if op.scales.shape[0] not in (1, hidden):
            _wrong_scales(op, f"[1] or [{hidden}]")
        return
    rows, columns = op.dims("scales", rank=2)
    if op.quant_mode == NO_QUANT:
        op.expect_equal("scales", rows, tokens, "dim 0")
        return
    if op.soc is not Soc.A2:  # A2 does not look
        op.expect_equal("scales", rows, scale_rows, "dim 0 (one row per expert)")
    op.expect_equal("scales", columns, hidden, "dim 1")


def _wrong_scales(op: Call, want: str) -> None:
    raise op.error("scales", got=f"shape {show_shape(op.scales.shape)}", want=want)


def _names(dtypes: Any) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)
