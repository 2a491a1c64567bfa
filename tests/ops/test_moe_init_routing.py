"""MoeInitRoutingV2 and MoeInitRoutingV2Grad."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.ops import OpError
from tests.ops.comparing import (
    FLOATS,
    assert_same_bits,
    kernel_and_reference,
    order_sensitive,
    routing,
)

TOKENS = st.sampled_from([0, 1, 2, 3, 7, 16])
TOP_K = st.sampled_from([1, 2, 3, 4, 5, 8])
HIDDEN = st.sampled_from([1, 3, 8, 17])
EXPERTS = st.sampled_from([1, 2, 5, 8])
SEEDS = st.integers(0, 1000)
PRODUCTS = st.sampled_from(list(Soc))


def _with_specials(x: torch.Tensor) -> torch.Tensor:
    """Put -0, infinities and NaN into the first values; a gather must carry them over."""
    flat = x.reshape(-1)
    for position, value in enumerate((-0.0, torch.inf, -torch.inf, torch.nan)[: flat.numel()]):
        flat[position] = value
    return x


@settings(deadline=None, max_examples=60)
@given(TOKENS, TOP_K, HIDDEN, EXPERTS, st.integers(0, 40), st.integers(0, 2), SEEDS)
def test_dropless_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, experts: int, active: int, flag: int, seed: int
) -> None:
    x = _with_specials(order_sensitive((tokens, hidden), seed, FLOATS[seed % 3]))
    ids = routing(tokens, top_k, experts, seed)
    attrs = {
        "expert_num": experts,
        "active_num": active,
        "expert_tokens_count_or_cumsum_flag": flag,
    }
    for got, want in zip(*kernel_and_reference("MoeInitRoutingV2", [x, ids], attrs), strict=True):
        assert_same_bits(got, want)


@settings(deadline=None, max_examples=60)
@given(TOKENS, TOP_K, HIDDEN, EXPERTS, st.integers(1, 20), st.booleans(), SEEDS)
def test_drop_pad_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, experts: int, capacity: int, before: bool, seed: int
) -> None:
    capacity = min(capacity, max(tokens, 1))
    x = _with_specials(order_sensitive((tokens, hidden), seed, FLOATS[seed % 3]))
    ids = routing(tokens, top_k, experts, seed)
    attrs = {
        "expert_num": experts,
        "expert_capacity": capacity,
        "drop_pad_mode": 1,
        "expert_tokens_before_capacity_flag": before,
    }
    for got, want in zip(*kernel_and_reference("MoeInitRoutingV2", [x, ids], attrs), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (9, 2, 4), (64, 8, 8)])
def test_dropless_against_eager_pytorch(tokens: int, top_k: int, experts: int) -> None:
    x = torch.randn(tokens, 6)
    ids = routing(tokens, top_k, experts, seed=1)
    expanded, row_idx, cumsum, before = ops.moe_init_routing(
        x, ids, expert_num=experts, expert_tokens_count_or_cumsum_flag=1
    )
    order = torch.sort(ids.flatten().long(), stable=True).indices
    assert torch.equal(expanded, x.repeat_interleave(top_k, 0)[order])
    assert torch.equal(row_idx.long(), torch.argsort(order))
    assert torch.equal(cumsum.long(), torch.bincount(ids.flatten(), minlength=experts).cumsum(0))
    assert before.shape == (0,)
    assert before.dtype is torch.int32


def test_no_expert_num_sorts_any_id() -> None:
    ids = torch.tensor([[7, 1 << 20], [3, 7]], dtype=torch.int32)
    _, row_idx, counts, _ = ops.moe_init_routing(torch.eye(2), ids)
    assert row_idx.tolist() == [1, 3, 0, 2]
    assert counts.shape == (0,)


@pytest.mark.parametrize("bad", [-1, 4])
def test_id_out_of_range(bad: int) -> None:
    ids = torch.tensor([[0, bad]], dtype=torch.int32)
    with pytest.raises(OpError, match=r"expert_idx: got ids from .* want ids in \[0, 4\)"):
        ops.moe_init_routing(torch.zeros(1, 2), ids, expert_num=4)


def test_id_beyond_exact_sort_keys() -> None:
    ids = torch.tensor([[1 << 24]], dtype=torch.int32)
    with pytest.raises(OpError, match="fp32"):
        ops.moe_init_routing(torch.zeros(1, 2), ids)


def test_int64_ids_are_for_950_only() -> None:
    ids = torch.tensor([[1, 0]])
    with pytest.raises(OpError) as caught:
        ops.moe_init_routing(torch.ones(1, 2), ids, expert_num=2)
    assert (caught.value.argument, caught.value.got) == ("expert_idx", "int64")
    assert caught.value.product == "A2"
    with ops.use_product(Soc.ASCEND950):
        _, row_idx, *_ = ops.moe_init_routing(torch.ones(1, 2), ids, expert_num=2)
    assert row_idx.tolist() == [1, 0]


X = torch.Tensor
Sum = Callable[..., X]

# The order of the sum on A2 and A3, for K rows x0, x1, ...: the table of spec/ops.md, section 4.
A2_ORDER: dict[int, Sum] = {
    1: lambda a: a,
    2: lambda a, b: a + b,
    3: lambda a, b, c: (a + c) + b,
    4: lambda a, b, c, d: (a + b) + (c + d),
    5: lambda a, b, c, d, e: ((a + e) + b) + (c + d),
    6: lambda a, b, c, d, e, f: (((a + e) + b) + f) + (c + d),
    7: lambda a, b, c, d, e, f, g: (((a + e) + b) + f) + ((c + g) + d),
    8: lambda a, b, c, d, e, f, g, h: ((a + b) + (c + d)) + ((e + f) + (g + h)),
}


def _by_fours(*rows: X) -> X:
    total = torch.zeros_like(rows[0])
    whole = len(rows) // 4 * 4
    for k in range(0, whole, 4):
        total = total + ((rows[k] + rows[k + 1]) + (rows[k + 2] + rows[k + 3]))
    return functools.reduce(torch.add, rows[whole:], total)


@pytest.mark.parametrize("top_k", A2_ORDER)
@pytest.mark.parametrize("soc", [Soc.A2, Soc.A3, Soc.ASCEND950])
def test_gradient_order(top_k: int, soc: Soc) -> None:
    tokens, hidden = 5, 33
    grad = order_sensitive((tokens * top_k, hidden), seed=top_k, dtype=torch.float32)
    row_idx = torch.randperm(tokens * top_k).to(torch.int32)
    rows = grad[row_idx.long()].view(tokens, top_k, hidden).unbind(1)
    want = _by_fours(*rows) if soc is Soc.ASCEND950 else A2_ORDER[top_k](*rows)
    with ops.use_product(soc):
        assert_same_bits(ops.moe_init_routing_grad(grad, row_idx, top_k), want)


def test_the_orders_differ() -> None:
    top_k = 6
    grad = order_sensitive((top_k * 64, 16), seed=0, dtype=torch.float32)
    row_idx = torch.arange(top_k * 64, dtype=torch.int32)
    results = []
    for soc in (Soc.A2, Soc.ASCEND950):
        with ops.use_product(soc):
            results.append(ops.moe_init_routing_grad(grad, row_idx, top_k))
    assert not torch.equal(*results)


def test_negative_zero() -> None:
    grad = torch.tensor([[-0.0]])
    row_idx = torch.zeros(1, dtype=torch.int32)
    assert torch.signbit(ops.moe_init_routing_grad(grad, row_idx, 1)).all()
    with ops.use_product(Soc.ASCEND950):
        assert not torch.signbit(ops.moe_init_routing_grad(grad, row_idx, 1)).any()


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([1, 2, 5]),
    st.one_of(st.integers(1, 20), st.sampled_from([31, 64, 127, 128, 130, 200])),
    HIDDEN,
    st.sampled_from(["dropless", "active", "drop_pad"]),
    PRODUCTS,
    SEEDS,
)
def test_gradient_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, mode: str, soc: Soc, seed: int
) -> None:
    copies = tokens * top_k
    generator = torch.Generator().manual_seed(seed)
    row_idx = torch.randperm(copies, generator=generator).to(torch.int32)
    attrs = {"top_k": top_k}
    shape: tuple[int, ...] = (copies, hidden)
    if mode == "active":
        attrs["active_num"] = max(1, copies // 2)
        shape = (attrs["active_num"], hidden)
    if mode == "drop_pad":
        attrs["drop_pad_mode"] = 1
        shape = (2, copies, hidden)
        dropped = torch.rand(copies, generator=generator) < 0.4
        row_idx = torch.where(dropped, -1, row_idx)
    grad = order_sensitive(shape, seed, FLOATS[seed % 3])
    got, want = kernel_and_reference("MoeInitRoutingV2Grad", [grad, row_idx], attrs, soc)
    assert_same_bits(got[0], want[0])


@pytest.mark.parametrize("active", [0, 5, 100])
def test_gradient_against_eager_autograd(active: int) -> None:
    tokens, top_k, experts = 6, 3, 4
    x = torch.randn(tokens, 7, dtype=torch.float32, requires_grad=True)
    ids = routing(tokens, top_k, experts, seed=3)
    expanded, *_ = ops.moe_init_routing(x, ids, expert_num=experts, active_num=active)
    weights = torch.randn_like(expanded)
    (expanded * weights).sum().backward()

    wide = x.detach().double().requires_grad_()
    order = torch.sort(ids.flatten().long(), stable=True).indices[: expanded.shape[0]]
    (wide[order // top_k] * weights.double()).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.float())


def test_drop_pad_gradient_against_eager_autograd() -> None:
    tokens, top_k, experts, capacity = 7, 2, 3, 3
    x = torch.randn(tokens, 5, requires_grad=True)
    ids = routing(tokens, top_k, experts, seed=4)
    expanded, row_idx, *_ = ops.moe_init_routing(
        x, ids, expert_num=experts, expert_capacity=capacity, drop_pad_mode=1
    )
    weights = torch.randn_like(expanded)
    (expanded * weights).sum().backward()
    kept = row_idx >= 0
    want = torch.zeros_like(x).index_add_(
        0,
        torch.arange(tokens).repeat_interleave(top_k)[kept],
        weights.view(-1, 5)[row_idx[kept].long()],
    )
    torch.testing.assert_close(x.grad, want)


def test_gradient_rejects_wrong_rows() -> None:
    row_idx = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(OpError, match="multiple of 4"):
        ops.moe_init_routing_grad(torch.zeros(6, 2), row_idx, 4)
    with pytest.raises(OpError, match="grad_expanded_x: got dim 0 5, want 6"):
        ops.moe_init_routing_grad(torch.zeros(5, 2), row_idx, 2)
    with pytest.raises(OpError, match="indices from 0 to 9"):
        ops.moe_init_routing_grad(torch.zeros(2, 2), torch.tensor([0, 9], dtype=torch.int32), 1)


def test_950_skips_indices_out_of_range() -> None:
    grad = torch.ones(4, 1)
    row_idx = torch.tensor([0, 9, -3, 2], dtype=torch.int32)
    with ops.use_product(Soc.ASCEND950):
        got = ops.moe_init_routing_grad(grad, row_idx, 2)
    assert got.tolist() == [[1.0], [1.0]]
    with pytest.raises(OpError, match="indices from -3 to 9"):
        ops.moe_init_routing_grad(grad, row_idx, 2)
