"""Unary, binary and ternary elementwise arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Number, Tensor, direct, ge_op

_UNARY: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Digamma": torch.digamma,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Invert": torch.bitwise_not,
    "IsFinite": torch.isfinite,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
    "Lgamma": torch.lgamma,
    "Log1p": torch.log1p,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Rint": torch.round,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tan": torch.tan,
}

_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Atan2": torch.atan2,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.fmod,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "Sub": torch.sub,
    "Xlogy": torch.xlogy,
}

#: Comparisons take operands of different dtypes: they compare in the wider one.
_COMPARE: dict[str, Callable[..., Tensor]] = {
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "NotEqual": torch.ne,
}

for _op_type, _function in _UNARY.items():
    direct(_function, "x")(_op_type)
for _op_type, _function in _BINARY.items():
    direct(_function, "x1", "x2")(_op_type)
for _op_type, _function in _COMPARE.items():
    direct(_function, "x1", "x2", same_dtype=False)(_op_type)
direct(torch.bitwise_left_shift, "x", "y")("LeftShift")
direct(torch.bitwise_right_shift, "x", "y")("RightShift")
direct(torch.erfinv, "input_x")("Erfinv")
direct(torch.trunc, "input_x")("Trunc")


@ge_op("RealDiv", "Div", same_dtype=("x1", "x2"))
def real_div(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 / x2 in the dtype of the inputs; integers are truncated."""
    if x1.is_floating_point() or x1.is_complex():
        return torch.div(x1, x2)
    return torch.div(x1, x2, rounding_mode="trunc")


@ge_op("TruncateDiv", same_dtype=("x1", "x2"))
def truncate_div(x1: Tensor, x2: Tensor) -> Tensor:
    return torch.div(x1, x2, rounding_mode="trunc")


@ge_op("DivNoNan", same_dtype=("x1", "x2"))
def div_no_nan(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 / x2, and 0 where x2 is 0."""
    return real_div(x1, x2.masked_fill(x2 == 0, 1)).masked_fill(x2 == 0, 0)


@ge_op("SquaredDifference", same_dtype=("x1", "x2"))
@in_fp32
def squared_difference(x1: Tensor, x2: Tensor) -> Tensor:
    return (x1 - x2).square()


@ge_op("Exp")
@in_fp32
def exp(x: Tensor, *, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Base ** (scale * x + shift); base -1 stands for e."""
    exponent = x if scale == 1.0 and shift == 0.0 else x * scale + shift
    return torch.exp(exponent) if base == -1.0 else torch.pow(base, exponent)


@ge_op("Log")
@in_fp32
def log(x: Tensor, *, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Logarithm of scale * x + shift; base -1 stands for e."""
    argument = x if scale == 1.0 and shift == 0.0 else x * scale + shift
    if base == -1.0:
        return torch.log(argument)
    if base in (2.0, 10.0):
        return torch.log2(argument) if base == 2.0 else torch.log10(argument)
    return torch.log(argument) / torch.log(torch.tensor(base, dtype=argument.dtype))


@ge_op("Muls")
def muls(x: Tensor, *, value: float) -> Tensor:
    return x * _scalar(x, value)


@ge_op("Adds")
def adds(x: Tensor, *, value: float) -> Tensor:
    return x + _scalar(x, value)


@ge_op("Axpy", same_dtype=("x1", "x2"))
def axpy(x1: Tensor, x2: Tensor, *, alpha: float) -> Tensor:
    """x1 + alpha * x2."""
    return torch.add(x1, x2, alpha=_scalar(x1, alpha))


@ge_op("AxpyV2", same_dtype=("x1", "x2", "alpha"))
def axpy_v2(x1: Tensor, x2: Tensor, alpha: Number) -> Tensor:
    """x1 + alpha * x2."""
    return torch.add(x1, x2, alpha=alpha)


@ge_op("Sxpy", same_dtype=("x1", "x2", "alpha"))
def sxpy(x1: Tensor, x2: Tensor, alpha: Number | None) -> Tensor:
    """x1 - alpha * x2."""
    return torch.sub(x1, x2, alpha=1 if alpha is None else alpha)


@ge_op("Addcmul", same_dtype=("input_data", "x1", "x2", "value"))
@in_fp32
def addcmul(input_data: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    """input_data + value * x1 * x2."""
    return input_data + value * x1 * x2


@ge_op("Addcdiv", same_dtype=("input_data", "x1", "x2", "value"))
@in_fp32
def addcdiv(input_data: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    """input_data + value * x1 / x2."""
    return input_data + value * x1 / x2


@ge_op("Lerp", same_dtype=("start", "end", "weight"))
def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(start, end, weight)


@ge_op("ClipByValueV2", "ClipByValue", same_dtype=("x", "clip_value_min", "clip_value_max"))
def clip_by_value(x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    return torch.clamp(x, clip_value_min, clip_value_max)


@ge_op("NanToNum")
def nan_to_num(
    x: Tensor,
    *,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    return torch.nan_to_num(x, nan, posinf, neginf)


@ge_op("Cast", ignored=("truncate",))
def cast(x: Tensor, *, dst_type: torch.dtype) -> Tensor:
    return x.to(dst_type)


@ge_op("Bitcast", view=True)
def bitcast(x: Tensor, *, type: torch.dtype, keep_dim: bool = False) -> Tensor:
    """Reinterpret the bits as another dtype of the same size."""
    if x.element_size() != torch.empty((), dtype=type).element_size():
        raise KernelError("type", type, f"a dtype as wide as {x.dtype}")
    return x.view(type)


@ge_op("Complex", same_dtype=("real", "imag"))
def complex_(real: Tensor, imag: Tensor, *, Tout: torch.dtype = torch.complex64) -> Tensor:
    return torch.complex(real, imag).to(Tout)


@ge_op("Real")
def real(input: Tensor, *, Tout: torch.dtype = torch.float32) -> Tensor:
    return torch.real(input).to(Tout)


@ge_op("Imag")
def imag(input: Tensor, *, Tout: torch.dtype = torch.float32) -> Tensor:
    return torch.imag(input).to(Tout)


def _scalar(x: Tensor, value: float) -> Number:
    """Return a Float attribute as a number of the tensor's kind."""
    return value if x.is_floating_point() or x.is_complex() else int(value)
