"""MoeTokenUnpermute and MoeTokenUnpermuteGrad."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import infer_shape, ops
from moe_graph.config import Soc
from moe_graph.ops import OpError
from moe_graph.ops.defs.token_permute.on_950 import served_by
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference, order_sensitive

_ops = torch.ops.moe_graph
T, K, H, R = sympy.symbols("t k h r", integer=True, positive=True)
OWN_PRODUCTS = st.sampled_from([Soc.A2, Soc.A3])


def _places(copies: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(copies, generator=generator).to(torch.int32)


def _probs(tokens: int, top_k: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(tokens, top_k, generator=generator)
    return probs.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.2, 0.0).to(dtype)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([0, 1, 2, 7]),
    st.sampled_from([0, 1, 2, 3, 8, 70]),
    st.sampled_from([1, 8, 17]),
    st.sampled_from([0, 1, 4, None]),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from(list(Soc)),
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    left_out: int | None,
    dtype: torch.dtype,
    probs_dtype: torch.dtype,
    soc: Soc,
    seed: int,
) -> None:
    copies = tokens * max(top_k, 1)
    left = copies if left_out is None else left_out
    rows = copies if soc is Soc.ASCEND950 else max(copies - left, 0)
    permuted = order_sensitive((rows, hidden), seed, dtype)
    probs = _probs(tokens, top_k, seed, probs_dtype) if top_k else None
    inputs = [permuted, _places(copies, seed), probs]
    got, want = kernel_and_reference("MoeTokenUnpermute", inputs, {}, soc)
    assert_same_bits(got[0], want[0])


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([0, 1, 2, 7]),
    st.sampled_from([0, 1, 2, 3, 8]),
    st.sampled_from([1, 8, 17, 100]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from(list(Soc)),
    st.integers(0, 1000),
)
def test_gradient_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    left_out: int,
    dtype: torch.dtype,
    probs_dtype: torch.dtype,
    soc: Soc,
    seed: int,
) -> None:
    copies = tokens * max(top_k, 1)
    permuted = order_sensitive((max(copies - left_out, 0), hidden), seed, dtype)
    grad = order_sensitive((tokens, hidden), seed + 1, dtype)
    probs = _probs(tokens, top_k, seed, probs_dtype) if top_k else None
    inputs = [permuted, grad, _places(copies, seed), probs]
    got, want = kernel_and_reference("MoeTokenUnpermuteGrad", inputs, {}, soc)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def test_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    places = torch.tensor([3, 0, 2, 1]).int()
    probs = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    got = ops.moe_token_unpermute(rows, places, probs)
    assert got.tolist() == [[3.75, 4.5], [13.0, 16.0]]
    assert ops.moe_token_unpermute(rows, places).tolist() == rows[[3, 0, 2, 1]].tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("probs_dtype", FLOATS)
def test_terms_are_rounded_and_added_in_order(dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    rows = order_sensitive((30, 17), 1, dtype)
    places, probs = _places(30, 2), torch.randn(5, 6).to(probs_dtype)
    terms = rows[places.long()].float().view(5, 6, 17) * probs.float().unsqueeze(2)
    want = functools.reduce(torch.add, terms.unbind(1)).to(dtype)
    assert_same_bits(ops.moe_token_unpermute(rows, places, probs), want)


def test_rows_left_out_and_probs_of_zero_are_not_read() -> None:
    rows = torch.tensor([[torch.nan], [2.0], [3.0]])
    places = torch.tensor([0, 1, 2, 3]).int()
    probs = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert ops.moe_token_unpermute(rows, places, probs).tolist() == [[2.0], [3.0]]
    probs = torch.tensor([[-0.0, 0.0], [0.0, 1.0]])
    assert_same_bits(ops.moe_token_unpermute(rows, places, probs), torch.zeros(2, 1))


def test_strided_inputs() -> None:
    rows, grad = torch.randn(7, 12).t(), torch.randn(7, 6).t()
    places, probs = _places(12, 3).repeat_interleave(2)[::2], torch.rand(2, 6).t()
    dense = [tensor.contiguous() for tensor in (rows, grad, places, probs)]
    for got, want in zip(
        ops.moe_token_unpermute_grad(rows, grad, places, probs),
        ops.moe_token_unpermute_grad(*dense),
        strict=True,
    ):
        assert_same_bits(got, want)
    want = ops.moe_token_unpermute(dense[0], dense[2], dense[3])
    assert_same_bits(ops.moe_token_unpermute(rows, places, probs), want)
    ids = torch.arange(12).view(2, 6).t()
    for got, want in zip(
        ops.moe_token_permute(grad, ids), ops.moe_token_permute(dense[1], ids.clone()), strict=True
    ):
        assert_same_bits(got, want)


def test_a_nan_prob_is_not_zero() -> None:
    probs = torch.tensor([[torch.nan, 1.0]])
    got = ops.moe_token_unpermute(torch.ones(2, 1), torch.arange(2).int(), probs)
    assert got.isnan().all()


def test_950_sums_as_finalize_routing() -> None:
    rows, places = order_sensitive((12, 5), 3, torch.bfloat16), _places(12, 4)
    probs = torch.randn(4, 3)
    with ops.use_product(Soc.ASCEND950):
        got = ops.moe_token_unpermute(rows, places, probs)
        want = ops.moe_finalize_routing(rows, places, scales=probs, drop_pad_mode=2)
        assert_same_bits(got, want)
        rows[int(places[0])] = torch.nan
        probs[0, 0] = 0.0
        assert ops.moe_token_unpermute(rows, places, probs)[0].isnan().all()
        with pytest.raises(OpError, match="11 rows for 12 indices, want a row"):
            ops.moe_token_unpermute(rows[:11], places, probs)


def test_unwritten_rows_are_nan() -> None:
    rows, grad = torch.ones(2, 3), torch.ones(2, 3)
    places, probs = torch.tensor([0, 1, 2, 3]).int(), torch.ones(2, 2)
    rows_grad, probs_grad = _ops.moe_token_unpermute_grad(rows, grad, places, probs)
    assert rows_grad[2:].isnan().all()
    assert rows_grad[:2].tolist() == grad.tolist()
    assert probs_grad.tolist() == [[3, 3], [0, 0]]
    rows_grad, _ = ops.moe_token_unpermute_grad(rows, grad, places, probs)
    assert rows_grad.tolist() == grad.tolist()


@pytest.mark.parametrize("soc", list(Soc))
@pytest.mark.parametrize("left_out", [0, 4, 12])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16])
def test_autograd(soc: Soc, left_out: int, dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    if soc is Soc.ASCEND950 and left_out:
        pytest.skip("950 has no rows left out")
    count = 12 - left_out
    rows = torch.randn(count, 65).to(dtype).requires_grad_()
    probs = torch.rand(4, 3).to(probs_dtype).requires_grad_()
    places = _places(12, 6)
    with ops.use_product(soc):
        out = ops.moe_token_unpermute(rows, places, probs)
        weights = torch.randn(4, 65).to(dtype)
        out.backward(weights)

    wide_rows = rows.detach().double().requires_grad_()
    wide_probs = probs.detach().double().requires_grad_()
    padded = torch.cat([wide_rows, wide_rows.new_zeros(left_out, 65)])
    terms = padded[places.long()].view(4, 3, 65) * wide_probs.unsqueeze(2)
    terms.sum(1).backward(weights.double())
    assert rows.grad is not None
    assert probs.grad is not None
    assert wide_rows.grad is not None
    assert wide_probs.grad is not None
    torch.testing.assert_close(rows.grad, wide_rows.grad.to(dtype))
    torch.testing.assert_close(probs.grad, wide_probs.grad.to(probs_dtype))


@pytest.mark.parametrize("soc", list(Soc))
def test_autograd_without_probs(soc: Soc) -> None:
    rows = torch.randn(5, 3, requires_grad=True)
    places, weights = _places(5, 1), torch.randn(5, 3)
    with ops.use_product(soc):
        ops.moe_token_unpermute(rows, places).backward(weights)
    assert rows.grad is not None
    assert torch.equal(rows.grad[places.long()], weights)


def test_permute_and_unpermute_round_trip_in_training() -> None:
    tokens = torch.randn(6, 4, requires_grad=True)
    probs = torch.rand(6, 2, requires_grad=True)
    ids = torch.randint(0, 3, (6, 2))
    rows, places = ops.moe_token_permute(tokens, ids, 10)
    ops.moe_token_unpermute(rows.sin(), places, probs).sum().backward()
    wide, weights = tokens.detach().clone().requires_grad_(), probs.detach().requires_grad_()
    kept = (places < 10).view(6, 2)
    (wide.sin().unsqueeze(1) * (weights * kept).unsqueeze(2)).sum().backward()
    torch.testing.assert_close(tokens.grad, wide.grad)
    torch.testing.assert_close(probs.grad, weights.grad)


ROWS, PLACES, PROBS = torch.ones(4, 3), torch.arange(4).int(), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROWS, PLACES, torch.ones(3, 2)), "sorted_indices: got dim 0 4, want 6"),
        ((ROWS, PLACES, torch.ones(2, 2, 1)), "probs: .* want 2 dimensions"),
        ((ROWS.view(2, 2, 3), PLACES, PROBS), "permuted_tokens: .* want 2 dimensions"),
        ((ROWS, PLACES.view(2, 2), PROBS), "sorted_indices: .* want 1 dimensions"),
        ((ROWS, PLACES.long(), PROBS), "sorted_indices: got int64"),
        ((ROWS.double(), PLACES, PROBS), "permuted_tokens: got float64"),
        ((ROWS, PLACES, PROBS.int()), "probs: got int32"),
        ((ROWS, PLACES, PROBS, True), "padded_mode: got True"),
        ((ROWS, torch.arange(513).int(), torch.ones(1, 513)), "topK = 513, want <= 512"),
        ((ROWS, PLACES - 1, PROBS), "values from -1 to 2"),
        ((ROWS, PLACES + 1, PROBS), "values from 1 to 4"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OpError, match=message):
        ops.moe_token_unpermute(*arguments)


GRAD = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROWS, GRAD, PLACES, torch.ones(3, 2)), "probs: got dim 0 3, want 2"),
        ((ROWS, GRAD, PLACES[:3], PROBS), "sorted_indices: got dim 0 3, want 4"),
        ((ROWS, GRAD[:, :2], PLACES, PROBS), "permuted_tokens: got dim 1 3, want 2"),
        ((None, GRAD, PLACES, PROBS), "permuted_tokens: got nothing"),
        ((ROWS, GRAD.half(), PLACES, PROBS), "unpermuted_tokens_grad: got float16"),
        ((ROWS, GRAD, PLACES[:1]), "sorted_indices: got 1 indices, want 2"),
        ((ROWS, GRAD, PLACES, PROBS, True), "padded_mode"),
        ((ROWS, GRAD, torch.tensor([0, 1, 1, 2]).int(), PROBS), "3 rows for 4 copies"),
        ((ROWS, GRAD, PLACES + 1, PROBS), "values from 1 to 4"),
        ((ROWS, GRAD.view(2, 3, 1), PLACES, PROBS), "unpermuted_tokens_grad: .* want 2 dim"),
    ],
)
def test_bad_gradient(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OpError, match=message):
        _ops.moe_token_unpermute_grad(*arguments)


def test_shapes() -> None:
    weighted = [([T * K, H], "bf16"), ([T * K], "int32"), ([T, K], "float32")]
    assert infer_shape("MoeTokenUnpermute", weighted, {}) == [(T, H)]
    assert infer_shape("MoeTokenUnpermute", [([R, H], "bf16"), ([T], "int32")], {}) == [(T, H)]
    unknown = [([-2], "bf16"), ([-2], "int32"), ([-2], "float32")]
    assert infer_shape("MoeTokenUnpermute", unknown, {}) == [(-1, -1)]
    partly = [([-1, 8], "bf16"), ([-1], "int32"), ([-1, 2], "float32")]
    assert infer_shape("MoeTokenUnpermute", partly, {}) == [(-1, 8)]


def test_infershape_looks_at_no_rank() -> None:
    inputs = [([6, 5, 1], "bf16"), ([6], "int32"), ([6], "bf16")]
    assert infer_shape("MoeTokenUnpermute", inputs, {}) == [(6, 5)]


def test_gradient_shapes() -> None:
    rest = [([T, H], "bf16"), ([T * K], "int32"), ([T, K], "float32")]
    ge_type = "MoeTokenUnpermuteGrad"
    assert infer_shape(ge_type, [([R, H], "bf16"), *rest], {}) == [(T * K, H), (T, K)]
    assert infer_shape(ge_type, [None, *rest[:2]], {}) == [(T * K, H), None]
    unknown = [([-2], "bf16"), *rest]
    assert infer_shape(ge_type, unknown, {}) == [(T * K, H), (T, K)]
    assert infer_shape(ge_type, unknown, {}, upstream=True) == [(), (T, K)]


def test_one_graph_for_any_number_of_tokens() -> None:
    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def layer(tokens: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, places = ops.moe_token_permute(tokens, ids)
        return ops.moe_token_unpermute(rows.tanh(), places, probs)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (4, 7, 30):
            tokens = torch.randn(count, 6, requires_grad=True)
            probs = torch.rand(count, 2, requires_grad=True)
            ids = torch.randint(0, 3, (count, 2))
            for tensor in (tokens, probs, ids):
                torch._dynamo.mark_dynamic(tensor, 0)
            layer(tokens, ids, probs).sum().backward()
            assert tokens.grad is not None
            want = probs.detach().sum(1, keepdim=True) * (1 - tokens.detach().tanh() ** 2)
            torch.testing.assert_close(tokens.grad, want)


def test_what_serves_the_gradient_on_950() -> None:
    rows, grad, places = (
        order_sensitive((12, 7), 0, torch.float32),
        torch.randn(4, 7),
        _places(12, 1),
    )
    probs = torch.rand(4, 3)
    attrs = {"padded_mode": False, "restore_shape": (1, 1)}
    served = served_by("MoeTokenUnpermuteGrad", [rows, grad, places, probs], attrs)
    assert served.ge_type == "MoeFinalizeRoutingV2Grad"
    given_inputs = {
        "permuted_tokens": rows,
        "unpermuted_tokens_grad": grad,
        "sorted_indices": places,
        "probs": probs,
    }
    inputs = [given_inputs[source.name] for source in served.inputs if source is not None]
    with ops.use_product(Soc.ASCEND950):
        other = _ops.moe_finalize_routing_v2_grad(*inputs, **served.attrs)
        want = _ops.moe_token_unpermute_grad(rows, grad, places, probs)
    for at, expected in zip(served.outputs, want, strict=True):
        assert at is not None
        assert_same_bits(other[at], expected)
    alone = served_by("MoeTokenUnpermuteGrad", [rows, grad, places, None], attrs)
    assert (len(alone.inputs), alone.outputs) == (2, (0, None))


def test_opcheck() -> None:
    rows, probs = torch.randn(6, 3, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(_ops.moe_token_unpermute.default, (rows, _places(6, 0), probs))
    torch.library.opcheck(_ops.moe_token_unpermute.default, (rows, _places(6, 0)))


@pytest.mark.parametrize("left_out", [0, 2])
def test_the_public_gradients_are_traced_with_any_number_of_tokens(left_out: int) -> None:
    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def gradients(
        rows: torch.Tensor, grad: torch.Tensor, places: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows_grad, probs_grad = ops.moe_token_unpermute_grad(rows, grad, places, probs)
        return rows_grad, probs_grad, ops.moe_token_permute_grad(rows, places, 2)

    for tokens in (4, 9):
        rows, grad = torch.randn(2 * tokens - left_out, 6), torch.randn(tokens, 6)
        places, probs = _places(2 * tokens, tokens), torch.rand(tokens, 2)
        rows_grad, probs_grad, tokens_grad = gradients(rows, grad, places, probs)
        want = ops.moe_token_unpermute_grad(rows, grad, places, probs)
        assert_same_bits(rows_grad, want[0])
        assert_same_bits(probs_grad, want[1])
        assert_same_bits(tokens_grad, ops.moe_token_permute_grad(rows, places, 2))
