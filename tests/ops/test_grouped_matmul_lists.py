"""GroupedMatmul with lists of weights, and the two readings of its group list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.ops import OpError
from tests.ops.comparing import kernel_and_reference

SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=2, max_size=4)


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@settings(deadline=None, max_examples=40)
@given(SIZES, st.integers(0, 1), st.booleans(), st.booleans(), st.integers(0, 2))
def test_a_list_of_weights_is_one_product_per_group(
    sizes: list[int], kind: int, transposed: bool, biased: bool, spare: int
) -> None:
    x = _randn(sum(sizes) + spare, 5, seed=1)
    shape = (3, 5) if transposed else (5, 3)
    weights = [_randn(*shape, seed=2 + group) for group in range(len(sizes))]
    biases = [_randn(3, seed=20 + group) for group in range(len(sizes))] if biased else None
    counts = torch.tensor(sizes)
    y = ops.grouped_matmul(
        x,
        weights,
        biases,
        group_list=counts if kind else counts.cumsum(0),
        transpose_weight=transposed,
        group_list_type=kind,
    )
    rows = sum(sizes)
    assert torch.isnan(y[rows:]).all()
    upstream = torch.randn(rows, 3)
    leaves = [x, *weights, *(biases or [])]
    got = torch.autograd.grad(y[:rows], leaves, upstream)

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = []
    for group, part in enumerate(wide[0][:rows].split(sizes)):
        matrix = wide[1 + group]
        product = part @ (matrix.t() if transposed else matrix)
        parts.append(product + wide[1 + len(sizes) + group] if biased else product)
    joined = torch.cat(parts)
    torch.testing.assert_close(y[:rows].double(), joined, rtol=1e-5, atol=1e-5)
    want = torch.autograd.grad(joined, wide, upstream.double())
    torch.testing.assert_close(got[0][:rows].double(), want[0][:rows], rtol=1e-5, atol=1e-5)
    for one, other in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_without_groups(transposed: bool) -> None:
    xs = [_randn(2, 4, seed=1), _randn(3, 5, seed=2)]
    weights = [_randn(4, 6, seed=3), _randn(5, 2, seed=4)]
    biases = [_randn(6, seed=5), _randn(2, seed=6)]
    stored = [weight.t() for weight in weights] if transposed else weights
    ys = torch.ops.moe_graph.grouped_matmul(
        xs, stored, biases, [], [], [], [], None, transpose_weight=transposed
    )
    want = [x @ weight + bias for x, weight, bias in zip(xs, weights, biases, strict=True)]
    upstream = [torch.randn(y.shape) for y in want]
    leaves = [*xs, *weights, *biases]
    torch.testing.assert_close(
        torch.autograd.grad(ys, leaves, upstream), torch.autograd.grad(want, leaves, upstream)
    )


def test_several_x_joined_have_no_gradient() -> None:
    xs, weights = [_randn(2, 4, seed=1), _randn(3, 4, seed=2)], [_randn(4, 6, seed=3)] * 2
    (y,) = torch.ops.moe_graph.grouped_matmul(
        xs, weights, [], [], [], [], [], None, split_item=3, group_type=0
    )
    with pytest.raises(NotImplementedError, match="group_type 0 with 2 tensors x"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("values", "kind", "hint"),
    [
        ([3, 1], 0, "sizes of groups: group_list_type=1"),
        ([1, 4], 1, "a running sum: group_list_type=0"),
        ([3, 2], 0, None),
        ([5, 5], 1, None),
        ([-1, 4], 0, None),
    ],
)
def test_a_list_that_fits_the_other_reading_says_so(
    values: list[int], kind: int, hint: str | None
) -> None:
    with pytest.raises(OpError) as caught:
        ops.grouped_matmul(
            torch.zeros(4, 3),
            torch.zeros(2, 3, 5),
            group_list=torch.tensor(values),
            group_list_type=kind,
        )
    assert caught.value.argument == "group_list"
    assert ("group_list_type=" in str(caught.value)) == (hint is not None)
    assert hint is None or hint in str(caught.value)


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(0, 2))
def test_a_list_of_weights_along_the_inner_dim(sizes: list[int], spare: int) -> None:
    x = _randn(sum(sizes) + spare, 4, seed=1).detach()
    weights = [_randn(size, 3 + group, seed=2 + group).detach() for group, size in enumerate(sizes)]
    inputs = [[x], weights, [], [], [], [], [], None]
    attrs = {"split_item": 0, "group_type": 2, "transpose_x": True}
    got, naive = kernel_and_reference("GroupedMatmul", inputs, attrs)
    parts = x[: sum(sizes)].double().split(sizes)
    for y, same, part, weight in zip(got, naive, parts, weights, strict=True):
        assert y is not None
        torch.testing.assert_close(y.double(), part.t() @ weight.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, same)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"split_item": 3}, "split_item"),
        ({"transpose_x": False}, "transpose_x"),
        ({"rows": 4}, "weight"),
        ({"group_list": torch.tensor([2, 5])}, "group_list"),
    ],
)
def test_bad_lists_along_the_inner_dim_are_named(change: dict[str, Any], argument: str) -> None:
    x, weights = torch.zeros(change.get("rows", 5), 4), [torch.zeros(2, 3), torch.zeros(3, 3)]
    with pytest.raises(OpError) as raised:
        torch.ops.moe_graph.grouped_matmul(
            [x],
            weights,
            [],
            [],
            [],
            [],
            [],
            change.get("group_list"),
            split_item=change.get("split_item", 0),
            group_type=2,
            transpose_x=change.get("transpose_x", True),
        )
    assert raised.value.argument == argument
