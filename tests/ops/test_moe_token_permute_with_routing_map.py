"""MoeTokenPermuteWithRoutingMap and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.ops import OpError, find, infer_shape
from moe_graph.ops.defs.routing_map import moe_token_permute_with_routing_map_autograd as autograd
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference, order_sensitive
from tests.ops.routing_map_inputs import MIXED, error_of, map_of, permuted_indices
from tests.ops.test_symbolic import Symbols

PERMUTE, GRAD = "MoeTokenPermuteWithRoutingMap", "MoeTokenPermuteWithRoutingMapGrad"
DTYPES = st.sampled_from([*((dtype, dtype) for dtype in FLOATS), MIXED])
TOKENS, EXPERTS = st.sampled_from([0, 1, 2, 7]), st.sampled_from([1, 3, 4])
HIDDEN, SEEDS = st.sampled_from([1, 3, 16]), st.integers(0, 1000)


@settings(deadline=None, max_examples=120)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.booleans(), st.booleans(), SEEDS)
def test_kernel_is_the_definition(
    tokens: int,
    experts: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    pad: bool,
    with_probs: bool,
    seed: int,
) -> None:
    top_k = 1 + seed % experts
    routing_map = map_of(tokens, experts, top_k, seed=seed, exact=seed % 2 == 0)
    routing_map = routing_map if seed % 3 else routing_map.to(torch.int8)
    inputs = [
        order_sensitive((tokens, hidden), seed, dtypes[0]),
        routing_map.t(),
        order_sensitive((experts, tokens), seed + 1, dtypes[1]) if with_probs else None,
    ]
    count = seed % (tokens + 1) * experts if pad else tokens * top_k
    attrs = {"num_out_tokens": count, "drop_and_pad": pad}
    got, want = kernel_and_reference(PERMUTE, inputs, attrs, list(Soc)[seed % 3])
    for one, expected in zip(got, want, strict=True):
        assert_same_bits(one, expected)


def test_the_example_of_the_page() -> None:
    tokens = torch.tensor([[0.1], [0.2], [0.3]])
    probs = torch.tensor([[0.5, 0.3], [0.4, 0.6], [0.2, 0.8]])
    permuted, permuted_probs, indices = ops.moe_token_permute_with_routing_map(
        tokens, torch.ones((3, 2), dtype=torch.int8), probs=probs, num_out_tokens=6
    )
    torch.testing.assert_close(permuted.view(-1), torch.tensor([0.1, 0.2, 0.3] * 2))
    assert permuted_probs is not None
    torch.testing.assert_close(permuted_probs, torch.tensor([0.5, 0.4, 0.2, 0.3, 0.6, 0.8]))
    assert indices.tolist() == [0, 3, 1, 4, 2, 5]
    assert indices.dtype is torch.int32


@pytest.mark.parametrize("seed", range(5))
def test_dropless_is_masked_select(seed: int) -> None:
    tokens, experts, top_k = 6, 5, 3
    routing_map = map_of(tokens, experts, top_k, seed=seed)
    x, probs = torch.randn(tokens, 4), torch.rand(tokens, experts)
    permuted, permuted_probs, indices = ops.moe_token_permute_with_routing_map(
        x, routing_map, probs=probs, num_out_tokens=tokens * top_k
    )
    token_of_row = torch.arange(tokens).expand(experts, -1).masked_select(routing_map.t())
    assert torch.equal(permuted, x[token_of_row])
    assert torch.equal(permuted_probs, probs.t().masked_select(routing_map.t()))
    assert torch.equal(indices.long(), token_of_row.argsort(stable=True))


@pytest.mark.parametrize("seed", range(5))
def test_drop_and_pad_is_a_stable_sort_of_the_map(seed: int) -> None:
    tokens, experts, capacity = 7, 4, 3
    routing_map = map_of(tokens, experts, 2, seed=seed)
    x, probs = torch.randn(tokens, 4), torch.rand(tokens, experts)
    permuted, permuted_probs, indices = ops.moe_token_permute_with_routing_map(
        x, routing_map, probs=probs, num_out_tokens=experts * capacity + 1, drop_and_pad=True
    )
    order = routing_map.t().to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    order = order[:, :capacity]
    assert torch.equal(indices.long(), order.reshape(-1))
    assert torch.equal(permuted, x[order.reshape(-1)])
    assert torch.equal(permuted_probs, probs.t().gather(1, order).view(-1))


def test_slots_and_rows_that_no_copy_uses() -> None:
    routing_map = torch.tensor([[True, True], [False, True], [False, False]])
    permuted, probs, indices = ops.moe_token_permute_with_routing_map(
        torch.tensor([[1.0], [2.0], [3.0]]),
        routing_map,
        probs=torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
        num_out_tokens=6,
    )
    assert indices.tolist() == [0, 1, 2, -1, -1, -1]
    assert permuted[:3].view(-1).tolist() == [1, 1, 2]
    assert permuted[3:].isnan().all()
    assert probs is not None
    torch.testing.assert_close(probs[:3], torch.tensor([0.1, 0.2, 0.4]))
    assert probs[3:].isnan().all()


def test_by_default_one_row_per_token() -> None:
    permuted, probs, indices = ops.moe_token_permute_with_routing_map(
        torch.tensor([[1.0], [2.0]]), torch.tensor([[False, True], [True, False]])
    )
    assert permuted.view(-1).tolist() == [2, 1]
    assert probs is None
    assert indices.tolist() == [1, 0]


@settings(deadline=None, max_examples=120)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.booleans(), st.booleans(), SEEDS)
def test_gradient_kernel_is_the_definition(
    tokens: int,
    experts: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    pad: bool,
    with_probs: bool,
    seed: int,
) -> None:
    tokens = max(tokens, 1)
    top_k = 1 + seed % experts
    routing_map = map_of(tokens, experts, top_k, seed=seed, exact=seed % 2 == 0)
    rows = (1 + seed % tokens) * experts if pad else tokens * top_k
    inputs = [
        order_sensitive((rows, hidden), seed, dtypes[0]),
        order_sensitive((rows,), seed + 1, dtypes[1]) if with_probs else None,
        permuted_indices(routing_map, rows, pad),
        routing_map if seed % 3 else routing_map.to(torch.int8),
    ]
    attrs = {"num_experts": experts, "tokens_num": tokens, "padded_mode": pad}
    got, want = kernel_and_reference(GRAD, inputs, attrs, list(Soc)[seed % 3])
    for one, expected in zip(got, want, strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), MIXED])
def test_gradients_against_float64_autograd(
    pad: bool, exact: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    tokens, experts, top_k, hidden = 6, 4, 3, 5
    routing_map = map_of(tokens, experts, top_k, seed=3, exact=exact)
    x = order_sensitive((tokens, hidden), 1, dtypes[0]).requires_grad_()
    probs = order_sensitive((tokens, experts), 2, dtypes[1]).requires_grad_()
    count = experts * 2 if pad else tokens * top_k
    permuted, permuted_probs, indices = ops.moe_token_permute_with_routing_map(
        x, routing_map, probs=probs, num_out_tokens=count, drop_and_pad=pad
    )
    assert permuted_probs is not None
    rows = count if pad else int(routing_map.sum())
    weight = order_sensitive((rows, hidden), 4, dtypes[0])
    of_probs = order_sensitive((rows,), 5, dtypes[1])
    ((permuted[:rows] * weight).sum() + (permuted_probs[:rows] * of_probs).sum()).backward()

    wide_x, wide_probs = (t.detach().double().requires_grad_() for t in (x, probs))
    if pad:
        token = indices.long()
        expert = torch.arange(experts).repeat_interleave(2)
    else:
        expert, token = routing_map.t().nonzero(as_tuple=True)
    want = (wide_x[token] * weight.double()).sum()
    want = want + (wide_probs[token, expert] * of_probs.double()).sum()
    want.backward()
    for ours, wide in ((x, wide_x), (probs, wide_probs)):
        assert ours.grad is not None
        assert ours.grad.dtype == ours.dtype
        rounding = 1e-5 if ours.dtype is torch.float32 else 2**-8
        torch.testing.assert_close(ours.grad.double(), wide.grad, rtol=rounding, atol=1e-5)


def test_sums_follow_the_slots() -> None:
    big, one = 2.0**24, 1.0
    indices = torch.tensor([1, 0, 2], dtype=torch.int32)
    rows = torch.tensor([[one], [big], [-big]])
    grad, none = ops.moe_token_permute_with_routing_map_grad(rows, None, indices, None, 3, 1)
    assert grad.item() == 0  # big + 1 rounds to big
    assert none is None
    grad, _ = ops.moe_token_permute_with_routing_map_grad(
        rows, None, indices[[0, 2, 1]], None, 3, 1
    )
    assert grad.item() == 1


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("pad", [False, True])
def test_few_tokens_train(tokens: int, pad: bool) -> None:
    x, probs = torch.randn(tokens, 3, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    permuted, permuted_probs, _ = ops.moe_token_permute_with_routing_map(
        x,
        torch.ones(tokens, 2, dtype=torch.bool),
        probs=probs,
        num_out_tokens=2 * tokens,
        drop_and_pad=pad,
    )
    assert permuted_probs is not None
    (permuted.sum() + permuted_probs.sum()).backward()
    assert torch.equal(x.grad, torch.full((tokens, 3), 2.0))
    assert torch.equal(probs.grad, torch.ones(tokens, 2))


def _call(**change: Any) -> Any:
    arguments: dict[str, Any] = {
        "tokens": torch.ones(4, 3),
        "routing_map": torch.ones(4, 2, dtype=torch.bool),
        "probs": torch.ones(4, 2),
        "num_out_tokens": 8,
    } | change
    return ops.moe_token_permute_with_routing_map(**arguments)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"tokens": torch.ones(4)}, "tokens"),
        ({"tokens": torch.ones(4, 3, dtype=torch.int32)}, "tokens"),
        ({"routing_map": torch.ones(5, 2, dtype=torch.bool)}, "routing_map"),
        ({"routing_map": torch.ones(4, 2, 1, dtype=torch.bool)}, "routing_map"),
        ({"routing_map": torch.ones(4, 2, dtype=torch.int32)}, "routing_map"),
        ({"routing_map": torch.full((4, 2), 2, dtype=torch.int8)}, "routing_map"),
        ({"probs": torch.ones(4, 3)}, "probs"),
        ({"probs": torch.ones(5, 2)}, "probs"),
        ({"probs": torch.ones(4, 2, dtype=torch.float16)}, "probs"),
        ({"num_out_tokens": -1}, "num_out_tokens"),
        ({"num_out_tokens": 9}, "num_out_tokens"),
        ({"num_out_tokens": 4}, "routing_map"),
        ({"num_out_tokens": 4 * 513}, "num_out_tokens"),
    ],
)
def test_bad_input(change: dict[str, Any], argument: str) -> None:
    assert error_of(_call, **change).argument == argument


def _grad(**change: Any) -> Any:
    arguments: dict[str, Any] = {
        "permuted_token_out_grad": torch.ones(8, 3),
        "probs_grad": torch.ones(8),
        "sorted_indices": torch.arange(8, dtype=torch.int32),
        "routing_map": torch.ones(4, 2, dtype=torch.bool),
        "experts_num": 2,
        "tokens_num": 4,
    } | change
    return ops.moe_token_permute_with_routing_map_grad(**arguments)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"permuted_token_out_grad": torch.ones(8)}, "permuted_token_output_grad"),
        ({"permuted_token_out_grad": torch.ones(9, 3)}, "sorted_indices"),
        ({"probs_grad": torch.ones(7)}, "permuted_probs_output_grad_optional"),
        ({"sorted_indices": torch.full((8,), 8, dtype=torch.int32)}, "sorted_indices"),
        ({"sorted_indices": torch.full((8,), -2, dtype=torch.int32)}, "sorted_indices"),
        (
            {"sorted_indices": torch.full((8,), 4, dtype=torch.int32), "drop_and_pad": True},
            "sorted_indices",
        ),
        ({"routing_map": None}, "routing_map_optional"),
        ({"routing_map": torch.ones(3, 2, dtype=torch.bool)}, "routing_map_optional"),
        ({"routing_map": torch.full((4, 2), -1, dtype=torch.int8)}, "routing_map_optional"),
        ({"experts_num": 3}, "routing_map_optional"),
        ({"tokens_num": 0, "probs_grad": None}, "tokens_num"),
        ({"experts_num": 0, "probs_grad": None}, "num_experts"),
        ({"tokens_num": 3, "probs_grad": None}, "permuted_token_output_grad"),
        (
            {"experts_num": 3, "probs_grad": None, "drop_and_pad": True}
            | {"sorted_indices": torch.zeros(8, dtype=torch.int32)},
            "permuted_token_output_grad",
        ),
    ],
)
def test_bad_input_of_the_gradient(change: dict[str, Any], argument: str) -> None:
    assert error_of(_grad, **change).argument == argument


def test_more_tokens_than_can_be_sorted() -> None:
    opdef = find(PERMUTE)
    assert opdef is not None
    for pad, tokens in ((False, 1 << 20), (True, 1 << 24)):
        specs = [
            ops.TensorSpec((tokens, 2), torch.float32),
            ops.TensorSpec((16, tokens), torch.int8),
        ]
        with pytest.raises(OpError, match="want <= 16777214 on A2"):
            opdef.infer(specs, {"num_out_tokens": tokens * 16, "drop_and_pad": pad}, Soc.A2)


def test_shapes_in_symbols_and_unknown() -> None:
    t, h, n = sympy.symbols("t h n", integer=True, positive=True)
    inputs: list[Any] = [([t, h], "bf16"), ([4, t], "int8"), ([4, t], "float")]
    shapes = infer_shape(PERMUTE, inputs, {"num_out_tokens": 10, "drop_and_pad": True})
    assert shapes == [(8, h), (8,), (8,)]
    rows = t * sympy.floor(10 / t)
    assert infer_shape(PERMUTE, inputs, {"num_out_tokens": 10}) == [(rows, h), (rows,), (rows,)]
    unknown: list[Any] = [([-1, 8], "bf16"), ([4, -1], "int8")]
    assert infer_shape(PERMUTE, unknown, {"num_out_tokens": 10}) == [(-1, 8), (-1,), (-1,)]
    unknown = [([-2], "bf16"), ([4, 5], "int8")]
    assert infer_shape(PERMUTE, unknown, {"num_out_tokens": 10}) == [(10, -1), (10,), (10,)]

    grads: list[Any] = [([n, h], "bf16"), ([n], "bf16"), ([n], "int32"), ([5, 4], "int8")]
    attrs = {"num_experts": 4, "tokens_num": 5}
    assert infer_shape(GRAD, grads, attrs) == [(5, h), (5, 4)]
    assert infer_shape(GRAD, grads, attrs, upstream=True) == [(5, h), (5, sympy.floor(n / 5))]
    assert infer_shape(GRAD, [([-2], "bf16"), None, ([-2], "int32")], attrs) == [(5, -1), None]


def test_drop_and_pad_of_any_token_count_adds_no_guard() -> None:
    symbols = Symbols()
    x, routing_map = symbols.tensor(5, 6), symbols.tensor(5, 4, dtype=torch.bool)
    probs = symbols.tensor(5, 4)
    with symbols.mode:
        x, probs = x.requires_grad_(), probs.requires_grad_()
        permuted, permuted_probs, _ = ops.moe_token_permute_with_routing_map(
            x, routing_map, probs=probs, num_out_tokens=8, drop_and_pad=True
        )
        assert permuted_probs is not None
        (permuted.sum() + permuted_probs.sum()).backward()
    assert x.grad is not None
    assert str(x.grad.shape[0]) == str(x.shape[0])
    assert probs.grad is not None
    assert str(probs.grad.shape[0]) == str(x.shape[0])
    assert symbols.env.guards == []


def test_the_gradient_of_any_token_count_is_that_of_the_op() -> None:
    routing_map = map_of(6, 4, 2, seed=1)
    indices = permuted_indices(routing_map, 12, True)
    grads = torch.randn(12, 5), torch.randn(12)
    tokens, probs = ops.moe_token_permute_with_routing_map_grad(
        *grads, indices, routing_map, 4, 6, True
    )
    free = autograd._of_any_token_count(*grads, indices, 4, 6)
    torch.testing.assert_close(free["tokens"], tokens)
    torch.testing.assert_close(free["probs"].t(), probs)


@pytest.mark.parametrize("pad", [False, True])
def test_opcheck(pad: bool) -> None:
    routing_map = map_of(5, 4, 2, seed=1)
    count = 8 if pad else 10
    x, probs = torch.randn(5, 6, requires_grad=True), torch.rand(4, 5, requires_grad=True)
    torch.library.opcheck(
        torch.ops.moe_graph.moe_token_permute_with_routing_map.default,
        (x, routing_map.t().contiguous(), probs, count, pad),
    )
    torch.library.opcheck(
        torch.ops.moe_graph.moe_token_permute_with_routing_map_grad.default,
        (
            torch.randn(count, 6),
            torch.randn(count),
            permuted_indices(routing_map, count, pad),
            routing_map,
            4,
            5,
            pad,
        ),
    )


def test_on_the_device() -> None:
    routing_map = map_of(5, 4, 2, seed=1, exact=False)
    x, probs = torch.randn(5, 6), torch.rand(5, 4)
    want = ops.moe_token_permute_with_routing_map(x, routing_map, probs=probs, num_out_tokens=10)
    got = ops.moe_token_permute_with_routing_map(
        x.npu(), routing_map.npu(), probs=probs.npu(), num_out_tokens=10
    )
    for one, expected in zip(got, want, strict=True):
        assert one is not None
        assert_same_bits(one.cpu(), expected)
