"""The Foreach family: one op on a list of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Int, Number, Tensor, Tensors, ge_op

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}


def _register_unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    @ge_op(f"Foreach{name}")
    def unary(x: Tensors) -> tuple[Tensor, ...]:
        return tuple(function(each) for each in x)


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Div": torch.div,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mul": torch.mul,
    "Pow": torch.pow,
}


def _of_dtype(scalar: Tensor, x: Tensor) -> Tensor:
    """Return a scalar operand in the dtype of x, so that it does not promote."""
    return scalar.reshape(()).to(x.dtype)


def _register_binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @ge_op(f"Foreach{name}List")
    def with_list(x1: Tensors, x2: Tensors) -> tuple[Tensor, ...]:
        return tuple(function(a, b) for a, b in zip(x1, x2, strict=True))

    @ge_op(f"Foreach{name}Scalar")
    def with_scalar(x: Tensors, scalar: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(each, _of_dtype(scalar, each)) for each in x)

    @ge_op(f"Foreach{name}ScalarList")
    def with_scalar_list(x: Tensors, scalars: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(a, _of_dtype(b, a)) for a, b in zip(x, scalars, strict=True))


for _name, _function2 in _BINARY.items():
    _register_binary(_name, _function2)


@ge_op("ForeachPowScalarAndTensor")
def pow_scalar_and_tensor(scalar: Tensor, x: Tensors) -> tuple[Tensor, ...]:
    return tuple(torch.pow(_of_dtype(scalar, each), each) for each in x)


def _register_sum(name: str, sign: int) -> None:
    @ge_op(f"Foreach{name}List")
    def with_list(x1: Tensors, x2: Tensors, alpha: Number) -> tuple[Tensor, ...]:
        return tuple(torch.add(a, b, alpha=sign * alpha) for a, b in zip(x1, x2, strict=True))

    @ge_op(f"Foreach{name}Scalar")
    def with_scalar(x: Tensors, scalar: Tensor) -> tuple[Tensor, ...]:
        return tuple(each + sign * _of_dtype(scalar, each) for each in x)

    @ge_op(f"Foreach{name}ScalarList")
    def with_scalar_list(x: Tensors, scalars: Tensor) -> tuple[Tensor, ...]:
        return tuple(a + sign * _of_dtype(b, a) for a, b in zip(x, scalars, strict=True))


_register_sum("Add", 1)
_register_sum("Sub", -1)


_X123 = ("x1", "x2", "x3")


@ge_op("ForeachAddcmulList")
@ge_op("ForeachAddcmulScalar", names=(*_X123, "scalar"))
@ge_op("ForeachAddcmulScalarList", names=(*_X123, "scalars"))
def addcmul(x: Tensors, x1: Tensors, x2: Tensors, scalar: Tensor) -> tuple[Tensor, ...]:
    """X + scalar * x1 * x2; one scalar for all tensors, or one each."""
    return _ternary(lambda a, b, c, s: a + s * b * c, x, x1, x2, scalar)


@ge_op("ForeachAddcdivList")
@ge_op("ForeachAddcdivScalar", names=(*_X123, "scalar"))
@ge_op("ForeachAddcdivScalarList", names=(*_X123, "scalars"))
def addcdiv(x: Tensors, x1: Tensors, x2: Tensors, scalar: Tensor) -> tuple[Tensor, ...]:
    """X + scalar * x1 / x2; one scalar for all tensors, or one each."""
    return _ternary(lambda a, b, c, s: a + s * b / c, x, x1, x2, scalar)


def _ternary(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    x: Tensors,
    x1: Tensors,
    x2: Tensors,
    scalar: Tensor,
) -> tuple[Tensor, ...]:
    scalars = scalar.reshape(-1).expand(len(x)) if scalar.numel() == 1 else scalar
    compute = in_fp32(function)
    return tuple(compute(*each) for each in zip(x, x1, x2, scalars, strict=True))


@ge_op("ForeachLerpScalar")
def lerp_scalar(x1: Tensors, x2: Tensors, weight: Number) -> tuple[Tensor, ...]:
    return tuple(torch.lerp(a, b, weight) for a, b in zip(x1, x2, strict=True))


@ge_op("ForeachLerpList", names=("x1", "x2", "weight"))
def lerp_list(x1: Tensors, x2: Tensors, weights: Tensors) -> tuple[Tensor, ...]:
    return tuple(torch.lerp(a, b, w) for a, b, w in zip(x1, x2, weights, strict=True))


@ge_op("ForeachNorm")
def norm(x: Tensors, scalar: Number) -> tuple[Tensor, ...]:
    """The `scalar`-norm of every tensor."""
    return tuple(torch.linalg.vector_norm(each, scalar) for each in x)


_ROUNDING = {2: torch.floor, 3: torch.ceil, 4: torch.round, 5: torch.trunc, 7: torch.frac}


@ge_op("ForeachRoundOffNumber")
def round_off(x: Tensors, roundMode: Int) -> tuple[Tensor, ...]:
    if roundMode not in _ROUNDING:
        raise KernelError("roundMode", roundMode, f"one of {list(_ROUNDING)}")
    return tuple(_ROUNDING[roundMode](each) for each in x)
