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
@pytest.mark.parametrize(
    ("start", "step"), [(0, 2), (1, 2), (0, 3), (2, 3), (6, 2), (-3, 1), (-8, 1), (-63, 1)]
)
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


_INDEXED = {
    "first": (0,),
    "middle": (None, 1),
    "adjacent": (None, 1, 2),
    "apart": (0, None, 2),
    "apart from the second": (None, 1, None, 3),
    "all": (0, 1, 2, 3),
}


@pytest.mark.parametrize("dims", _INDEXED.values(), ids=_INDEXED)
@pytest.mark.parametrize("values", ["whole", "row", "number"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(dims: tuple[int | None, ...], values: str, accumulate: bool) -> None:
    x = randn(7, 8, 9, 10)
    # Rows of an index differ where one may be written only once; negative ones count from the end.
    places = torch.tensor([[5, -7], [0, 3]])
    if accumulate:
        places = torch.tensor([[5, -7], [5, 3]])
    index = [None if dim is None else places for dim in dims]
    shape = x[tuple(slice(None) if each is None else each for each in index)].shape
    source = {"whole": randn(*shape), "row": randn(shape[-1]), "number": randn(1)[0]}[values]
    got = decomposition(aten.index_put.default)(x, index, source, accumulate)
    torch.testing.assert_close(got, aten.index_put(x, index, source, accumulate))


@pytest.mark.parametrize("index", [[torch.tensor([True, False, True])], [None]])
def test_index_put_leaves_masks_to_torchair(index: list[Tensor | None]) -> None:
    put = decomposition(aten.index_put.default)
    assert put(randn(3, 2), index, randn(1)) is NotImplemented


@pytest.mark.parametrize("source", [True, torch.tensor([[False, True], [True, True]])])
def test_scatter_of_bools(source: bool | Tensor) -> None:
    x, index = torch.tensor([[True, False, True], [False, False, True]]), torch.tensor([[0, 1]] * 2)
    op = aten.scatter.src if isinstance(source, Tensor) else aten.scatter.value
    got = decomposition(op)(x, 1, index, source)
    torch.testing.assert_close(got, x.scatter(1, index, source))
    assert decomposition(op)(x.float(), 1, index, source) is NotImplemented


@pytest.mark.parametrize("columns", [None, 3, 7])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int64])
def test_eye(columns: int | None, dtype: torch.dtype | None) -> None:
    sizes = (5,) if columns is None else (5, columns)
    op = aten.eye.default if columns is None else aten.eye.m
    torch.testing.assert_close(decomposition(op)(*sizes, dtype=dtype), op(*sizes, dtype=dtype))


@pytest.mark.parametrize("n", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("unitriangular", [False, True])
def test_solve_triangular(n: int, upper: bool, left: bool, unitriangular: bool) -> None:
    a = randn(2, 3, n, n) / n + 2 * torch.eye(n, dtype=torch.float64)
    b = randn(3, n, 4) if left else randn(3, 4, n)
    options = {"upper": upper, "left": left, "unitriangular": unitriangular}
    solve = decomposition(aten.linalg_solve_triangular.default)
    want = torch.linalg.solve_triangular(a, b, **options)
    torch.testing.assert_close(solve(a, b, **options), want)


def test_solve_triangular_is_as_exact_as_substitution() -> None:
    a = torch.randn(4, 64, 64).tril(-1) / 4 + torch.eye(64)
    b = torch.randn(4, 64, 8)
    exact = torch.linalg.solve_triangular(a.double(), b.double(), upper=False)
    substituted = torch.linalg.solve_triangular(a, b, upper=False)
    got = decomposition(aten.linalg_solve_triangular.default)(a, b, upper=False)
    assert (got - exact).abs().max() <= 8 * (substituted - exact).abs().max()


@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_all(dim: int | None, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).to(dtype)
    given = () if dim is None else (dim, True)
    op = aten.all.default if dim is None else aten.all.dim
    torch.testing.assert_close(decomposition(op)(x, *given), op(x, *given))


def test_polar_and_conjugate() -> None:
    absolute, angle = randn(3, 4).abs(), randn(3, 4) * 5
    got = decomposition(aten.polar.default)(absolute, angle)
    torch.testing.assert_close(got, torch.polar(absolute, angle))
    conjugate = decomposition(aten._conj.default)
    torch.testing.assert_close(conjugate(got), got.conj().resolve_conj())
    assert conjugate(angle) is angle


@pytest.mark.parametrize(("beta", "threshold"), [(1, 20), (2.0, 1.5)])
def test_softplus_with_its_gradient(beta: float, threshold: float) -> None:
    x = torch.tensor([-800.0, -3.0, 0.0, 0.7, 0.8, 25.0, 800.0]).double().requires_grad_()
    y = functional.softplus(x, beta, threshold)
    grad = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, grad)
    with torch.no_grad():
        torch.testing.assert_close(decomposition(aten.softplus.default)(x, beta, threshold), y)
    backward = decomposition(aten.softplus_backward.default)
    torch.testing.assert_close(backward(grad, x, beta, threshold), want)


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


def indexed(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.tensor([[0, 3], [-1, 0]], device=x.device)
    return (x @ w)[:, rows, rows.T]


def softplus(x: Tensor, w: Tensor) -> Tensor:
    return functional.softplus(x @ w)


def complex_rotary(x: Tensor, w: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1] * 3, device=x.device).view(-1, 3).float()
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex((x @ w).unflatten(-1, (3, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


def solved(x: Tensor, w: Tensor) -> Tensor:
    a = w.tril(-1) + torch.eye(6, device=w.device)
    return torch.linalg.solve_triangular(a, x.mT, upper=False, unitriangular=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "function",
    [gated, rotated, indexed, softplus, complex_rotary, solved],
    ids=lambda function: function.__name__,
)
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
        (lambda x, i, v: x.index_put((i,), v), True),
        (lambda x, i, v: (x > 0).scatter(0, i.expand(4, 2).T, True), True),
        (lambda x, i, v: torch.eye(x.shape[0], device=x.device) @ x, True),
        (lambda x, i, v: torch.stack([(x > -1).all(0), (x > -1).all().expand(4)]), True),
    ],
    ids=[
        "index_copy",
        "repeat_interleave",
        "all masked",
        "safe_softmax",
        "index_put",
        "scatter of bools",
        "eye",
        "all",
    ],
)
def test_results_through_the_graph_engine(function: Any, exact: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs = (torch.randn(5, 4), torch.tensor([3, 0]), torch.randn(2, 4))
    compiled = torch.compile(
        function, backend=moe_graph.npu_backend(), fullgraph=True, dynamic=dynamic
    )
    got = compiled(*(each.npu() for each in inputs)).cpu()
    torch.testing.assert_close(got, function(*inputs), **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_repeat_interleave_backward_is_the_gradient(dim: int | None) -> None:
    x = randn(3, 4).requires_grad_()
    y = x.repeat_interleave(3, dim)
    grad = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, grad)
    backward = decomposition(torch.ops.npu.repeat_interleave_backward_int.default)
    torch.testing.assert_close(backward(grad, x, 3, dim), want)


@pytest.mark.parametrize("arguments", [{}, {"nan": 1.5}, {"posinf": 2.0, "neginf": -3.0}])
def test_nan_to_num_through_the_engine(arguments: dict[str, float]) -> None:
    torch._dynamo.reset()
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, -2.0])
    compiled = torch.compile(
        lambda x: torch.nan_to_num(x, **arguments), backend=moe_graph.npu_backend()
    )
    assert torch.equal(compiled(x.npu()).cpu(), torch.nan_to_num(x, **arguments))
