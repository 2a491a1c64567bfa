"""ATen op -> TorchAir converter -> GE node -> engine, against eager PyTorch on the CPU.

What the declared cases of TorchAir do not reach: dtypes, broadcasting, other dims, several ops at
once. Each row is one graph that computes all its results for all its dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from through_torchair import assert_same, check, compiled
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = (F32, BF16, F16)
INTS = (torch.int32, torch.int64)


def normal(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape).to(dtype)


def positive(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: (torch.rand(shape) + 0.1).to(dtype)


def unit(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: (torch.rand(shape) * 1.8 - 0.9).to(dtype)


def integers(low: int, high: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randint(low, high, shape).to(dtype)


def index(high: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randint(0, high, shape)


def flags(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.rand(shape) > 0.5


def permutations(rows: int, columns: int, width: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.stack([torch.randperm(columns)[:width] for _ in range(rows)])


def each(*functions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: [function(*args) for function in functions]


M = normal(3, 5)
UNARY = (
    torch.abs, torch.ceil, torch.cos, torch.cosh, torch.erf, torch.exp, torch.expm1, torch.floor,
    torch.neg, torch.relu, torch.round, torch.sigmoid, torch.sign, torch.sin, torch.sinh,
    torch.tan, torch.tanh,
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.floor_divide,
    torch.remainder, torch.pow, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge,
)  # fmt: skip
INT_BINARY = (
    torch.add, torch.sub, torch.mul, torch.floor_divide, torch.remainder, torch.eq, torch.lt,
    torch.bitwise_and, torch.bitwise_or, torch.div,
)  # fmt: skip

Row = tuple[Callable[..., Any], tuple[Any, ...], tuple[torch.dtype, ...]]

OPS: dict[str, Row] = {
    # elementwise
    "unary": (each(*UNARY), (M,), FLOATS),
    "unary_positive": (
        each(torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt,
             torch.reciprocal, lambda x: torch.acosh(x + 1)),
        (positive(3, 5),), FLOATS),
    "unary_unit": (
        each(torch.acos, torch.asin, torch.atan, torch.asinh, torch.atanh, torch.erfinv),
        (unit(3, 5),), FLOATS),
    "binary": (
        each(*BINARY), (positive(3, 5), positive(5)), FLOATS),
    "binary_ints": (
        each(*INT_BINARY),
        (integers(-9, 9, 3, 1), integers(1, 9, 5)), INTS),
    "logical": (
        each(torch.logical_and, torch.logical_or, torch.bitwise_and, torch.bitwise_or,
             lambda x, y: (~x, torch.logical_not(y))),
        (flags(3, 5), flags(5)), (torch.bool,)),
    "scalars": (
        each(lambda x, y: x + 2.5, lambda x, y: x * 2.5, lambda x, y: 1 - x, lambda x, y: x / 3,
             lambda x, y: torch.add(x, y, alpha=2), lambda x, y: torch.sub(x, y, alpha=2),
             lambda x, y: x**2, lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x * 0),
        (M, M), FLOATS),
    "fused": (
        lambda x, y, z: [torch.addcmul(x, y, z, value=0.5), torch.addcdiv(x, y, z, value=0.5)],
        (M, M, positive(5)), FLOATS),
    "clamp": (
        each(lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(min=0), lambda x: x.clamp(max=1)),
        (M,), FLOATS),
    "division_by_zero": (
        lambda x: [x / 0, torch.isinf(x / 0), torch.nan_to_num(x / 0, 0.0, 1.0, -1.0)],
        (lambda dtype: torch.tensor([1.0, 0.0, -1.0]).to(dtype),), FLOATS),
    "casts": (
        lambda x: [x.to(to) for to in (*FLOATS, *INTS, torch.int8, torch.bool, torch.float64)],
        (lambda dtype: (torch.randn(3, 5) * 9).to(dtype),), (*FLOATS, torch.int64)),
    # reductions and scans
    "sums": (
        each(lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum((0, 2), keepdim=True),
             lambda x: x.mean(), lambda x: x.mean(-1, keepdim=True), lambda x: x.cumsum(1),
             lambda x: x.mean(-1, dtype=F32)),
        (normal(3, 5, 2),), FLOATS),
    "sums_of_ints": (
        each(lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.cumsum(-1)),
        (integers(-9, 9, 3, 5),), (*INTS, torch.bool)),
    "extremes": (
        each(lambda x: x.max(), lambda x: x.max(1), lambda x: x.argmax(),
             lambda x: x.argmax(1), lambda x: x.argmin(1), lambda x: x.argmax(1, keepdim=True)),
        (normal(3, 5, 2),), FLOATS),
    "spread": (
        each(lambda x: x.std(1), lambda x: x.std((0, 1), keepdim=True), lambda x: x.logsumexp(1),
             lambda x: torch.linalg.vector_norm(x, 2, 1)),
        (M,), FLOATS),
    "truth": (each(torch.all, torch.any, lambda x: x.any(1)), (flags(3, 5),), (torch.bool,)),
    # shape
    "views": (
        each(lambda x: x.view(-1), lambda x: x.reshape(5, 6), lambda x: x.flatten(1),
             lambda x: x.unsqueeze(-1), lambda x: x.transpose(0, 1), lambda x: x.permute(2, 0, 1),
             lambda x: x.expand(4, 3, 5, 2), lambda x: x[:, :1].squeeze(1),
             lambda x: x.transpose(0, 1).reshape(-1)),
        (normal(3, 5, 2),), (*FLOATS, torch.int64, torch.bool)),
    "join_and_split": (
        each(lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, x], 1),
             lambda x, y: x.split(2, 1), lambda x, y: x.chunk(2, -1), lambda x, y: x.unbind(0),
             lambda x, y: x.split([1, 4], 1)),
        (M, normal(3, 2)), (*FLOATS, torch.int64)),
    "slices": (
        each(lambda x: x[1:], lambda x: x[:, 1:4:2], lambda x: x[..., -2:], lambda x: x[:, -1]),
        (M,), (*FLOATS, torch.int64, torch.bool)),
    "rearrange": (
        each(lambda x: x.flip(0), lambda x: x.tril(), lambda x: x.triu(1), lambda x: x.repeat(2, 3),
             lambda x: x.as_strided((3, 2), (2, 1), 1)),
        (M,), FLOATS),
    "padding": (
        each(lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (1, 0, 0, 2), value=3.0),
             lambda x: F.pad(x[None, None], (1, 2, 1, 1), mode="reflect")),
        (M,), FLOATS),
    "creation": (
        each(torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 3.0),
             lambda x: x.new_zeros(2, 3), lambda x: torch.arange(5, device=x.device),
             lambda x: torch.arange(1.0, 4.0, 0.5, device=x.device),
             lambda x: torch.full((2, 2), 7, device=x.device)),
        (M,), FLOATS),
    "copies": (
        each(lambda x, y: x.clone(), lambda x, y: x.clone().copy_(y),
             lambda x, y: x.select_scatter(y, 0, 1),
             lambda x, y: x.slice_scatter(y[None], 0, 1, 2)),
        (M, normal(5)), FLOATS),
    # index
    "gathers": (
        each(lambda x, i: x[i], lambda x, i: x[:, i], lambda x, i: x[i, i],
             lambda x, i: x.index_select(1, i), lambda x, i: x.gather(1, i[None].expand(3, 4)),
             lambda x, i: F.embedding(i, x), lambda x, i: x[i - 3]),
        (M, index(3, 4)), FLOATS),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s), (M, index(3, 20), normal(20, 5)), FLOATS),
    "scatters": (
        each(lambda x, i, s: x.scatter(1, i, s), lambda x, i, s: x.scatter(1, i, 2.0),
             lambda x, i, s: x.scatter_add(1, i, s)),
        (M, permutations(3, 5, 3), normal(3, 3)), FLOATS),
    "selects": (
        each(lambda x, y: torch.where(x > 0, x, y), lambda x, y: torch.where(x > 0, x, 0.0),
             lambda x, y: x.masked_fill(y > 0, -1.0),
             lambda x, y: x.masked_fill(y < 0, -torch.inf)),
        (M, M), FLOATS),
    "sorts": (
        each(lambda x: x.sort(), lambda x: x.sort(0, True), lambda x: x.argsort()),
        (M,), (F32, F16)),
    "top_k": (
        each(lambda x: x.topk(2), lambda x: x.topk(2, 0), lambda x: x.topk(2, largest=False)),
        (lambda dtype: torch.randperm(15).reshape(3, 5).to(dtype),), FLOATS),
    # products
    "products": (
        each(lambda a, b, c: a @ b, lambda a, b, c: torch.addmm(c, a, b), lambda a, b, c: a.t() @ a,
             lambda a, b, c: a @ b[:, 0], lambda a, b, c: F.linear(a, b.t(), c)),
        (M, normal(5, 4), normal(4)), FLOATS),
    "batched_products": (
        each(torch.matmul, torch.bmm, lambda a, b: torch.matmul(a[:, None], b),
             lambda a, b: torch.baddbmm(a[..., :4] * 0, a, b),
             lambda a, b: torch.einsum("bij,bjk->bik", a, b)),
        (normal(2, 3, 5), normal(2, 5, 4)), FLOATS),
    # layers
    "activations": (
        each(F.silu, F.relu6, F.elu, F.leaky_relu, F.hardswish, F.hardsigmoid, F.mish,
             F.logsigmoid, F.selu, F.hardtanh, lambda x: F.threshold(x, 0.1, 2.0),
             lambda x: F.gelu(x, approximate="tanh")),
        (M,), FLOATS),
    "gated": (each(F.glu, lambda x: F.prelu(x, x[0, :1])), (normal(3, 6),), FLOATS),
    "softmaxes": (
        each(lambda x: x.softmax(-1), lambda x: x.softmax(0), lambda x: x.log_softmax(-1),
             lambda x: x.softmax(-1, dtype=F32)),
        (M,), FLOATS),
    "norms": (
        each(lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda x, w, b: F.layer_norm(x, (6,)),
             lambda x, w, b: F.group_norm(x, 2, w, b)),
        (normal(3, 6), normal(6), normal(6)), FLOATS),
    "cross_entropy": (
        each(F.cross_entropy, lambda x, t: F.cross_entropy(x, t, reduction="sum"),
             lambda x, t: F.nll_loss(x, t, reduction="none"),
             lambda x, t: F.cross_entropy(x, t.where(t > 0, -100))),
        (normal(6, 5), index(5, 6)), FLOATS),
    "distances": (
        each(F.mse_loss, lambda x, y: F.mse_loss(x, y, reduction="none"),
             lambda x, y: F.mse_loss(x, y, reduction="sum")),
        (M, M), FLOATS),
}  # fmt: skip


def _run_all(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *argument_lists: [function(*args) for args in argument_lists]


def _arguments(row: Row) -> list[list[Tensor]]:
    _, makers, dtypes = row
    return [[make(dtype) for make in makers] for dtype in dtypes]


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    torch.manual_seed(0)
    check(_run_all(OPS[name][0]), _arguments(OPS[name]))


GRADIENTS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "sigmoid": (torch.sigmoid, (M,)),
    "tanh": (torch.tanh, (M,)),
    "relu": (F.relu, (M,)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (M,)),
    "leaky_relu": (F.leaky_relu, (M,)),
    "elu": (F.elu, (M,)),
    "hardswish": (F.hardswish, (M,)),
    "softmax": (lambda x: x.softmax(-1), (M,)),
    "glu": (F.glu, (normal(3, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), (M, normal(5), normal(5))),
    "matmul": (torch.matmul, (M, normal(5, 4))),
    "mse": (F.mse_loss, (M, M)),
    "division": (torch.div, (M, positive(5))),
    "power": (lambda x: x.pow(3), (M,)),
    "slices": (lambda x: x[1:, ::2] * 2, (M,)),
    "gather": (lambda x: x.gather(1, torch.arange(3, device=x.device)[:, None]), (M,)),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name: str) -> None:
    """Forward and backward graphs of plain TorchAir; what it cannot train is tested elsewhere."""
    torch.manual_seed(0)
    function, makers = GRADIENTS[name]
    inputs = [make(F32) for make in makers]

    def step(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
        for leaf in leaves:
            leaf.requires_grad_()
        (run(*leaves) * 0.5).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    got = step(compiled(function), [each.clone().npu() for each in inputs])
    want = step(function, [each.clone() for each in inputs])
    assert_same(got, want)
