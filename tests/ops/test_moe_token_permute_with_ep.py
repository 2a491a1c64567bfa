"""MoeTokenPermuteWithEp, MoeTokenUnpermuteWithEp and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import infer_shape, ops
from moe_graph.config import Soc
from moe_graph.ops import OpError
from tests.ops.comparing import (
    FLOATS,
    assert_same_bits,
    kernel_and_reference,
    order_sensitive,
    routing,
)

_ops = torch.ops.moe_graph
T, K, H = sympy.symbols("t k h", integer=True, positive=True)

TOKENS = st.sampled_from([0, 1, 2, 7])
TOP_K = st.sampled_from([1, 2, 3, 8])
HIDDEN = st.sampled_from([1, 8, 17])
PART = st.tuples(st.floats(0, 1), st.floats(0, 1))
"""Where a range starts and ends, as shares of the copies."""
DTYPES = st.sampled_from(FLOATS)
SEEDS = st.integers(0, 1000)


def _range(part: tuple[float, float], copies: int) -> tuple[int, int]:
    start, end = (round(share * copies) for share in sorted(part))
    return (start, end) if start < end else (0, 0)


def _rows_of(ep_range: tuple[int, int], copies: int) -> int:
    return ep_range[1] - ep_range[0] if ep_range != (0, 0) else copies


def _compare(ge_type: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    for got, want in zip(*kernel_and_reference(ge_type, inputs, attrs, Soc.A3), strict=True):
        assert_same_bits(got, want)


@settings(deadline=None, max_examples=60)
@given(TOKENS, TOP_K, HIDDEN, PART, DTYPES, st.booleans(), SEEDS)
def test_permute_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    part: tuple[float, float],
    dtype: torch.dtype,
    with_probs: bool,
    seed: int,
) -> None:
    x = order_sensitive((tokens, hidden), seed, dtype)
    ids = routing(tokens, top_k, 4, seed)
    probs = order_sensitive((tokens, top_k), seed, dtype) if with_probs else None
    _compare("MoeTokenPermuteWithEp", [x, ids, probs], {"range": _range(part, tokens * top_k)})


@settings(deadline=None, max_examples=60)
@given(TOKENS, TOP_K, HIDDEN, PART, DTYPES, st.booleans(), SEEDS)
def test_permute_gradient_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    part: tuple[float, float],
    dtype: torch.dtype,
    with_probs: bool,
    seed: int,
) -> None:
    ep_range = _range(part, tokens * top_k)
    rows = _rows_of(ep_range, tokens * top_k)
    grad = order_sensitive((rows, hidden), seed, dtype)
    places = torch.randperm(tokens * top_k).to(torch.int32)
    probs = order_sensitive((rows,), seed, dtype) if with_probs else None
    attrs = {"num_topk": top_k, "range": ep_range}
    _compare("MoeTokenPermuteWithEpGrad", [grad, places, probs], attrs)


@settings(deadline=None, max_examples=60)
@given(TOKENS, TOP_K, HIDDEN, PART, DTYPES, st.sampled_from([None, *FLOATS]), SEEDS)
def test_unpermute_kernels_are_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    part: tuple[float, float],
    dtype: torch.dtype,
    probs_dtype: torch.dtype | None,
    seed: int,
) -> None:
    ep_range = _range(part, tokens * top_k)
    rows = order_sensitive((_rows_of(ep_range, tokens * top_k), hidden), seed, dtype)
    grad = order_sensitive((tokens, hidden), seed + 1, dtype)
    places = torch.randperm(tokens * top_k).to(torch.int32)
    probs = None
    if probs_dtype is not None:
        probs = torch.randn(tokens, top_k).relu().to(probs_dtype)
    attrs: dict[str, Any] = {"num_topk": top_k, "range": ep_range}
    _compare("MoeTokenUnpermuteWithEp", [rows, places, probs], attrs)
    attrs = {"topk_num": top_k, "range": ep_range}
    _compare("MoeTokenUnpermuteWithEpGrad", [grad, places, rows, probs], attrs)


def test_by_hand() -> None:
    tokens = torch.tensor([[10.0], [20.0], [30.0]])
    ids = torch.tensor([[2, 0], [0, 1], [2, 0]])  # in order: 10 20 30 20 10 30
    probs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    rows, places, row_probs = _ops.moe_token_permute_with_ep(tokens, ids, probs, [1, 4])
    assert rows.flatten().tolist() == [20, 30, 20]
    assert row_probs.tolist() == [3, 6, 4]
    assert places.tolist() == [4, 0, 1, 3, 5, 2]

    out = _ops.moe_token_unpermute_with_ep(rows, places, probs, 2, [1, 4])
    assert out.flatten().tolist() == [0, 3 * 20 + 4 * 20, 6 * 30]
    out = _ops.moe_token_unpermute_with_ep(rows, places, None, 2, [1, 4])
    assert out.flatten().tolist() == [0, 40, 30]

    token_grad, probs_grad = _ops.moe_token_permute_with_ep_grad(
        torch.tensor([[1.0], [2.0], [4.0]]), places, torch.tensor([1.0, 2.0, 4.0]), 2, [1, 4]
    )
    assert token_grad.flatten().tolist() == [0, 5, 2]
    assert probs_grad.tolist() == [[0, 0], [1, 4], [0, 2]]

    rows_grad, probs_grad = _ops.moe_token_unpermute_with_ep_grad(
        torch.tensor([[1.0], [2.0], [4.0]]), places, rows, probs, False, [1, 1], [1, 4], 2
    )
    assert rows_grad[:3].flatten().tolist() == [6, 24, 8]
    assert rows_grad[3:].isnan().all()
    assert probs_grad.tolist() == [[0, 0], [40, 40], [0, 120]]


def test_the_ranks_add_up_to_the_whole() -> None:
    tokens, ids, probs = torch.randn(9, 4), routing(9, 3, 6, 0), torch.rand(9, 3)
    whole = ops.moe_token_unpermute(*ops.moe_token_permute(tokens, ids), probs)
    total = torch.zeros_like(whole)
    for ep_range in ([0, 11], [11, 20], [20, 27]):
        rows, places, _ = _ops.moe_token_permute_with_ep(tokens, ids, probs, ep_range)
        total += _ops.moe_token_unpermute_with_ep(rows, places, probs, 3, ep_range)
    torch.testing.assert_close(total, whole)


X, IDS, PROBS = torch.ones(2, 3), torch.zeros(2, 2).int(), torch.ones(2, 2)
ROWS, PLACES = torch.ones(4, 3), torch.arange(4).int()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("permute", (X, IDS, None, [3, 2]), "range: got .3, 2., want 0 <= start < end"),
        ("permute", (X, IDS, None, [-2, 2]), "range: got"),
        ("permute", (X, IDS, None, [1]), "range: got .1,., want .start, end"),
        ("permute", (X, IDS, None, [0, 5]), "want end <= 4, the copies"),
        ("permute", (X, IDS, None, [0, 0], 3), "num_out_tokens: got 3, want 0 without a range"),
        ("permute", (X, IDS, PROBS[:, :1]), "probs: got dim 1 1, want 2"),
        ("permute", (X, IDS, PROBS.view(4)), "probs: .* want 2 dimensions, as indices has"),
        ("permute", (X, IDS, None, [0, 2], 0, True), "padded_mode"),
        ("permute", (X, IDS - 1), "values from -1 to -1"),
        ("permute_grad", (ROWS, PLACES, None, 0), "num_topk: got 0"),
        ("permute_grad", (ROWS, PLACES, None, 3), "a multiple of 3"),
        ("permute_grad", (ROWS[:1], PLACES, None, 2, [1, 3]), "got 1 rows, want 2"),
        ("permute_grad", (ROWS, PLACES, torch.ones(3), 2), "got dim 0 3, want 4"),
        ("permute_grad", (ROWS, PLACES, None, 2, [0, 0], True), "padded_mode"),
        ("unpermute", (ROWS, PLACES, PROBS, 2, [2, 1]), "range"),
        ("unpermute", (ROWS[:1], PLACES, PROBS, 2, [1, 3]), "got 1 rows, want 2"),
        ("unpermute", (ROWS, PLACES, PROBS[:1], 2), "sorted_indices: got dim 0 4, want 2"),
        ("unpermute", (ROWS, PLACES, None, 3), "a multiple of 3"),
        ("unpermute", (ROWS, torch.arange(513).int(), None, 513), "topK = 513"),
        ("unpermute", (ROWS, PLACES + 1, None, 2), "values from 1 to 4"),
        ("unpermute_grad", (X, PLACES, ROWS, PROBS, True), "padded_mode"),
        ("unpermute_grad", (X, PLACES, None, PROBS), "permuted_tokens: got nothing"),
        ("unpermute_grad", (X, PLACES, None, None, False, [1, 1], [-1, -1], 3), "want 6, T . topK"),
        ("unpermute_grad", (X, PLACES, ROWS, PROBS, False, [1, 1], [2, 9]), "end <= 4"),
    ],
)
def test_bad_input(name: str, arguments: tuple[Any, ...], message: str) -> None:
    base, _, grad = name.partition("_")
    operator = getattr(_ops, f"moe_token_{base}_with_ep{'_grad' if grad else ''}")
    with pytest.raises(OpError, match=message):
        operator(*arguments)


def test_950_has_no_such_ops() -> None:
    with ops.use_product(Soc.ASCEND950), pytest.raises(OpError, match="want an op of 950"):
        _ops.moe_token_permute_with_ep(X, IDS)


def test_no_gradient_says_why() -> None:
    rows, *_ = _ops.moe_token_permute_with_ep(X.clone().requires_grad_(), IDS)
    with pytest.raises(NotImplementedError, match="GE sizes the gradient"):
        rows.sum().backward()


@pytest.mark.parametrize(
    ("ep_range", "rows"),
    [
        ((0, 0), K * T),
        ((2, 6), sympy.Min(4, K * T)),
        ((6, 2), K * T - sympy.Min(4, K * T)),
    ],
)
def test_permute_shapes(ep_range: tuple[int, int], rows: Any) -> None:
    inputs = [([T, H], "bf16"), ([T, K], "int64"), ([T, K], "bf16")]
    shapes = infer_shape("MoeTokenPermuteWithEp", inputs, {"range": ep_range})
    assert shapes == [(rows, H), (K * T,), (rows,)]


def test_shapes_of_unknown_sizes() -> None:
    inputs = [([-1, 8], "bf16"), ([-1, 2], "int64")]
    shapes = infer_shape("MoeTokenPermuteWithEp", inputs, {"range": (0, 4)})
    assert shapes == [(-1, 8), (-1,), None]
    unknown = [([-2], "bf16"), ([-2], "int64")]
    assert infer_shape("MoeTokenPermuteWithEp", unknown, {}) == [(-2,), (-1,), None]


def test_gradient_shapes() -> None:
    held = [([5, H], "bf16"), ([T * 4], "int32"), ([5], "bf16")]
    attrs = {"num_topk": 4, "range": (1, 6)}
    assert infer_shape("MoeTokenPermuteWithEpGrad", held, attrs) == [(T, H), (T, 4)]
    public = infer_shape("MoeTokenPermuteWithEpGrad", held, attrs, upstream=True)
    assert public == [(1, H), (1, 4)]
    rest = [([T, H], "bf16"), ([T * 4], "int32")]
    shapes = infer_shape("MoeTokenUnpermuteWithEpGrad", rest, {"topk_num": 4})
    assert shapes == [(T * 4, H), None]
    inputs = [([5, H], "bf16"), ([T * 4], "int32")]
    shapes = infer_shape("MoeTokenUnpermuteWithEp", inputs, {"num_topk": 4, "range": (1, 6)})
    assert shapes == [(T, H)]


def test_opcheck() -> None:
    torch.library.opcheck(_ops.moe_token_permute_with_ep.default, (X, IDS, PROBS, [1, 3]))
    places = torch.arange(4).int()
    torch.library.opcheck(
        _ops.moe_token_unpermute_with_ep.default, (ROWS, places, PROBS, 2, [1, 3])
    )
