"""Each decomposition against what it decomposes: the ATen op itself, or autograd in fp64.

Then each once more through TorchAir and the engine, inside the op that needs it.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moe_graph
from moe_graph.converters.decompositions import decompositions

aten = torch.ops.aten


def decomposition(op: Any) -> Any:
    return decompositions()[op]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


LEFT = [(4,), (5, 4), (3, 5, 4), (1, 5, 4), (2, 3, 5, 4), (2, 1, 5, 4)]
RIGHT = [(4,), (4, 6), (3, 4, 6), (1, 4, 6), (2, 3, 4, 6), (1, 3, 4, 6)]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(LEFT, RIGHT)), ids=str)
def test_matmul_backward_is_the_gradient_for_every_pair_of_ranks(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = randn(*left).requires_grad_(), randn(*right).requires_grad_()
    product = a @ b
    grad = torch.randn_like(product)
    wanted = torch.autograd.grad(product, (a, b), grad)
    backward = decomposition(aten.matmul_backward.default)
    for got, want in zip(backward(grad, a, b, [True, True]), wanted, strict=True):
        torch.testing.assert_close(got, want)
    only_left, nothing = backward(grad, a, b, [True, False])
    torch.testing.assert_close(only_left, wanted[0])
    assert nothing is None
    nothing, only_right = backward(grad, a, b, [False, True])
    torch.testing.assert_close(only_right, wanted[1])
    assert nothing is None


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("start", "step"), [(0, 2), (1, 2), (0, 3), (2, 3), (6, 2)])
def test_slice_backward_with_an_open_end(dim: int, start: int, step: int) -> None:
    x = randn(7, 8, 9)
    grad = torch.randn_like(aten.slice(x, dim, start, sys.maxsize, step))
    arguments = (grad, x.shape, dim, start, sys.maxsize, step)
    got = decomposition(aten.slice_backward.default)(*arguments)
    torch.testing.assert_close(got, aten.slice_backward(*arguments))


@pytest.mark.parametrize(
    ("start", "end", "step"), [(0, sys.maxsize, 1), (-3, sys.maxsize, 2), (0, 4, 2)]
)
def test_slice_backward_leaves_other_slices_to_torchair(start: int, end: int, step: int) -> None:
    backward = decomposition(aten.slice_backward.default)
    assert backward(randn(2), [7], 0, start, end, step) is NotImplemented


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 2), 0), ((3, 4, 2), 1), ((3, 4, 2), -1)])
@pytest.mark.parametrize("repeats", [1, 3])
def test_repeat_interleave(shape: tuple[int, ...], dim: int, repeats: int) -> None:
    x = randn(*shape)
    got = decomposition(aten.repeat_interleave.self_int)(x, repeats, dim)
    torch.testing.assert_close(got, x.repeat_interleave(repeats, dim))
    assert got.is_contiguous()


def test_repeat_interleave_of_everything() -> None:
    x = randn(3, 4)
    got = decomposition(aten.repeat_interleave.self_int)(x, 2, output_size=24)
    torch.testing.assert_close(got, x.repeat_interleave(2))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dim: int) -> None:
    x = randn(3, 4, 5)
    got = decomposition(aten.softmax.int)(x, dim)
    torch.testing.assert_close(got, x.softmax(dim))
    half = x.to(torch.bfloat16)
    got = decomposition(aten.softmax.int)(half, dim, torch.float32)
    torch.testing.assert_close(got, half.softmax(dim, dtype=torch.float32))


@pytest.mark.parametrize("dim", [0, -1])
def test_safe_softmax_gives_zeros_for_rows_of_minus_infinity(dim: int) -> None:
    x = randn(4, 4)
    x[1] = -math.inf
    x[:, 2] = -math.inf
    x[3, 0] = -math.inf
    got = decomposition(aten._safe_softmax.default)(x, dim)
    assert not got.isnan().any()
    torch.testing.assert_close(got, aten._safe_softmax(x, dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_copy(dim: int) -> None:
    x, index = randn(4, 5, 6), torch.tensor([3, 0])
    source = randn(*x.index_select(dim, index).shape)
    got = decomposition(aten.index_copy.default)(x, dim, index, source)
    torch.testing.assert_close(got, x.index_copy(dim, index, source))


def test_silu_backward() -> None:
    x = randn(4, 5).requires_grad_()
    y = functional.silu(x)
    grad = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(decomposition(aten.silu_backward.default)(grad, x), want)


def test_cast_backward() -> None:
    cast = decomposition(torch.ops.npu._npu_dtype_cast_backward.default)
    assert cast(torch.ones(2, dtype=torch.bfloat16), torch.float32).dtype == torch.float32


def gated(x: Tensor, w: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, w)) * x.float().to(x.dtype)


def rotated(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) @ w


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [gated, rotated], ids=lambda function: function.__name__)
def test_gradients_through_the_graph_engine(function: Any, dynamic: bool) -> None:
    torch._dynamo.reset()
    backend = moe_graph.npu_backend()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (5, 7) if dynamic else (5,):
        inputs = [torch.randn(2, rows, 6), torch.randn(6, 6)]
        wanted = [each.clone().requires_grad_() for each in inputs]
        given = [each.npu().requires_grad_() for each in inputs]
        function(*wanted).square().sum().backward()
        compiled(*given).square().sum().backward()
        for got, want in zip(given, wanted, strict=True):
            torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-4, atol=1e-4)
    assert backend.report.graphs == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x, i, v: x.index_copy(0, i, v), True),
        (lambda x, i, v: x.repeat_interleave(3, 1), True),
        (lambda x, i, v: aten._safe_softmax(x.masked_fill(x > -9, -math.inf), -1), True),
        (lambda x, i, v: aten._safe_softmax(x, -1), False),
    ],
    ids=["index_copy", "repeat_interleave", "all masked", "safe_softmax"],
)
def test_results_through_the_graph_engine(function: Any, exact: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs = (torch.randn(5, 4), torch.tensor([3, 0]), torch.randn(2, 4))
    compiled = torch.compile(
        function, backend=moe_graph.npu_backend(), fullgraph=True, dynamic=dynamic
    )
    got = compiled(*(each.npu() for each in inputs)).cpu()
    torch.testing.assert_close(got, function(*inputs), **({"rtol": 0, "atol": 0} if exact else {}))
