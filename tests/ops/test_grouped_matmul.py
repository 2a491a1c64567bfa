"""GroupedMatmul in its list form and its single form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.ops import OpError
from tests.ops.comparing import FLOATS, kernel_and_reference

SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=5)
DIMS = st.sampled_from([1, 3, 8])


def _randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _group_list(sizes: list[int], kind: int) -> torch.Tensor:
    counts = torch.tensor(sizes)
    return counts if kind == 1 else counts.cumsum(0)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both round one fp32 sum; they may differ by its order, so by one unit in the last place."""
    ulp = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[got.dtype]
    torch.testing.assert_close(got, want, rtol=ulp, atol=1e-5, equal_nan=True)


@settings(deadline=None, max_examples=80)
@given(SIZES, DIMS, DIMS, st.integers(0, 1), st.booleans(), st.booleans(), st.integers(0, 3))
def test_rows_kernel_is_the_definition(
    sizes: list[int],
    inner: int,
    columns: int,
    kind: int,
    transposed: bool,
    biased: bool,
    spare: int,
) -> None:
    dtype = FLOATS[spare % 3]
    groups = len(sizes)
    x = _randn(sum(sizes) + spare, inner, seed=1, dtype=dtype)
    weight = _randn(groups, inner, columns, seed=2, dtype=dtype)
    if transposed:
        weight = weight.mT.contiguous()
    bias_dtype = torch.float16 if dtype is torch.float16 else torch.float32
    bias = [_randn(groups, columns, seed=3, dtype=bias_dtype)] if biased else []
    attrs = {
        "split_item": 3,
        "group_type": 0,
        "group_list_type": kind,
        "transpose_weight": transposed,
    }
    inputs = [[x], [weight], bias, [], [], [], [], _group_list(sizes, kind)]
    got, want = kernel_and_reference("GroupedMatmul", inputs, attrs)
    assert got[0] is not None
    assert want[0] is not None
    _close(got[0], want[0])
    assert torch.isnan(got[0][sum(sizes) :]).all()
    assert not torch.isnan(got[0][: sum(sizes)]).any()


@settings(deadline=None, max_examples=40)
@given(SIZES, DIMS, DIMS, st.integers(0, 1), st.integers(0, 2))
def test_inner_kernel_is_the_definition(
    sizes: list[int], left: int, right: int, kind: int, seed: int
) -> None:
    rows = sum(sizes) + seed
    x = _randn(rows, left, seed=1, dtype=FLOATS[seed])
    weight = _randn(rows, right, seed=2, dtype=FLOATS[seed])
    attrs = {"split_item": 2, "group_type": 2, "group_list_type": kind, "transpose_x": True}
    inputs = [[x], [weight], [], [], [], [], [], _group_list(sizes, kind)]
    got, want = kernel_and_reference("GroupedMatmul", inputs, attrs)
    assert got[0] is not None
    assert want[0] is not None
    _close(got[0], want[0])
    for group, size in enumerate(sizes):
        if size == 0:
            assert torch.equal(got[0][group], torch.zeros(left, right, dtype=FLOATS[seed]))


@pytest.mark.parametrize("transposed", [False, True])
def test_lists(transposed: bool) -> None:
    xs = [_randn(2, 4, seed=1), _randn(3, 4, seed=2)]
    weights = [_randn(4, 6, seed=3), _randn(4, 6, seed=4)]
    biases = [_randn(6, seed=5), _randn(6, seed=6)]
    stored = [weight.t().contiguous() for weight in weights] if transposed else weights
    want = [x @ w + b for x, w, b in zip(xs, weights, biases, strict=True)]
    op = torch.ops.moe_graph.grouped_matmul
    got = op(xs, stored, biases, [], [], [], [], None, split_item=0, transpose_weight=transposed)
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected)
    options: dict[str, Any] = {
        "split_item": 3,
        "group_type": 0,
        "transpose_weight": transposed,
    }
    (joined,) = op(xs, stored, biases, [], [], [], [], None, **options)
    torch.testing.assert_close(joined, torch.cat(want))
    (split,) = op([torch.cat(xs)], stored, biases, [], [], [], [], torch.tensor([2, 5]), **options)
    torch.testing.assert_close(split, torch.cat(want))


def test_an_empty_tensor_stands_for_an_absent_input() -> None:
    x, weight = _randn(3, 4, seed=1), _randn(1, 4, 2, seed=2)
    empty = [torch.empty(0)]
    (y,) = torch.ops.moe_graph.grouped_matmul(
        [x],
        [weight],
        empty,
        empty,
        empty,
        empty,
        empty,
        torch.tensor([3]),
        split_item=3,
        group_type=0,
    )
    torch.testing.assert_close(y, x @ weight[0])


def test_bf16_with_bias_rounds_once() -> None:
    x = torch.tensor([[1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[[1.0 + 2**-7]]], dtype=torch.bfloat16)
    bias = torch.tensor([[2.0**-8 + 2**-12]])
    y = ops.grouped_matmul(x, weight, bias, group_list=torch.tensor([1]))
    assert y.item() == torch.tensor(1 + 2**-7 + 2**-8 + 2**-12).bfloat16().item()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_against_float64_autograd(transposed: bool, kind: int, biased: bool) -> None:
    sizes = [2, 0, 4, 1]
    x = _randn(7, 5, seed=1).requires_grad_()
    weight = _randn(4, 3, 5, seed=2) if transposed else _randn(4, 5, 3, seed=2)
    weight.requires_grad_()
    bias = _randn(4, 3, seed=3).requires_grad_() if biased else None
    y = ops.grouped_matmul(
        x,
        weight,
        bias,
        group_list=_group_list(sizes, kind),
        transpose_weight=transposed,
        group_list_type=kind,
    )
    upstream = _randn(7, 3, seed=4)
    (y * upstream).sum().backward()

    ours = [tensor for tensor in (x, weight, bias) if tensor is not None]
    wide = [tensor.detach().double().requires_grad_() for tensor in ours]
    rows = wide[0].split(sizes)
    matrices = wide[1].mT if transposed else wide[1]
    parts = [row @ matrix for row, matrix in zip(rows, matrices, strict=True)]
    if biased:
        parts = [part + wide[2][group] for group, part in enumerate(parts)]
    (torch.cat(parts) * upstream.double()).sum().backward()
    for got, want in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.grad, want.grad.float())


def test_double_backward() -> None:
    group_list = torch.tensor([2, 5])
    x = _randn(5, 3, seed=1).double().requires_grad_()
    assert x.dtype is torch.float64

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.grouped_matmul(x.float(), weight.float(), group_list=group_list).double()

    weight = _randn(2, 3, 4, seed=2).double().requires_grad_()
    inputs = (x, weight)
    assert torch.autograd.gradgradcheck(grouped, inputs, eps=1e-2, atol=1e-2, rtol=1e-2)


def test_bf16_bias_gradient_is_summed_in_fp32() -> None:
    rows = 512
    x = torch.zeros(rows, 2, dtype=torch.bfloat16)
    weight = torch.zeros(1, 2, 1, dtype=torch.bfloat16)
    bias = torch.zeros(1, 1, requires_grad=True)
    ops.grouped_matmul(x, weight, bias, group_list=torch.tensor([rows])).sum().backward()
    assert bias.grad.item() == rows


def _call(**change: Any) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 3),
        "weight": torch.zeros(2, 3, 5),
        "bias": None,
        "group_list": torch.tensor([1, 4]),
    }
    ops.grouped_matmul(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(4, 3, 1)}, "x"),
        ({"x": torch.zeros(4, 3, dtype=torch.int8)}, "weight"),
        ({"x": torch.zeros(4, 3, dtype=torch.int16)}, "x"),
        ({"weight": torch.zeros(2, 3, 5, dtype=torch.float16)}, "weight"),
        ({"weight": torch.zeros(2, 4, 5)}, "weight"),
        ({"weight": torch.zeros(3, 5)}, "weight"),
        ({"bias": torch.zeros(2, 4)}, "bias"),
        ({"bias": torch.zeros(2, 5, dtype=torch.float16)}, "bias"),
        ({"group_list": torch.tensor([4])}, "group_list"),
        ({"group_list": torch.tensor([1, 5])}, "group_list"),
        ({"group_list": torch.tensor([3, 1])}, "group_list"),
        ({"group_list": torch.tensor([-1, 4])}, "group_list"),
        ({"group_list": torch.tensor([2, -1]), "group_list_type": 1}, "group_list"),
        ({"group_list": torch.tensor([1, 4], dtype=torch.int32)}, "group_list"),
        ({"group_type": 1}, "group_type"),
        ({"group_type": 2}, "transpose_x"),
        ({"transpose_x": True}, "transpose_x"),
        ({"group_list_type": 2}, "group_list_type"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(OpError) as caught:
        _call(**change)
    assert caught.value.op == "GroupedMatmul"
    assert caught.value.argument == argument
