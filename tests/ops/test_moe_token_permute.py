"""MoeTokenPermute and MoeTokenPermuteGrad."""

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
from moe_graph.ops.defs.token_permute.on_950 import Source, served_by
from tests.ops.comparing import (
    FLOATS,
    assert_same_bits,
    kernel_and_reference,
    order_sensitive,
    routing,
)

DTYPES = (*FLOATS, torch.int8)
PRODUCTS = st.sampled_from(list(Soc))
N, K, H = sympy.symbols("n k h", integer=True, positive=True)


def _tokens(tokens: int, hidden: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.int8:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-128, 128, (tokens, hidden), generator=generator).to(dtype)
    values = order_sensitive((tokens, hidden), seed, dtype)
    flat = values.view(-1)
    for at, special in enumerate((-0.0, torch.inf, torch.nan)[: flat.numel()]):
        flat[at] = special
    return values


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([0, 1, 2, 7, 16]),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 3, 17]),
    st.sampled_from([1, 2, 8]),
    st.integers(-90, 90),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.int32, torch.int64]),
    PRODUCTS,
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    hidden: int,
    experts: int,
    num_out_tokens: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    soc: Soc,
    seed: int,
) -> None:
    indices = routing(tokens, max(top_k, 1), experts, seed).to(index_dtype)
    if top_k == 0:
        indices = indices.view(tokens)
    inputs = [_tokens(tokens, hidden, seed, dtype), indices]
    attrs = {"num_out_tokens": num_out_tokens}
    for got, want in zip(*kernel_and_reference("MoeTokenPermute", inputs, attrs, soc), strict=True):
        assert_same_bits(got, want)


def test_by_hand() -> None:
    tokens = torch.tensor([[10.0], [20.0], [30.0]])
    indices = torch.tensor([[2, 0], [0, 1], [2, 0]])
    rows, places = ops.moe_token_permute(tokens, indices)
    assert rows.flatten().tolist() == [10, 20, 30, 20, 10, 30]
    assert places.tolist() == [4, 0, 1, 3, 5, 2]
    assert places.dtype is torch.int32


@pytest.mark.parametrize(
    ("num_out_tokens", "rows"), [(None, 6), (0, 6), (4, 4), (9, 6), (-2, 4), (-6, 0), (-9, 0)]
)
def test_num_out_tokens_leaves_out_rows_but_no_places(
    num_out_tokens: int | None, rows: int
) -> None:
    tokens, indices = torch.randn(3, 4), routing(3, 2, 3, seed=1)
    order = torch.sort(indices.flatten(), stable=True).indices
    got, places = ops.moe_token_permute(tokens, indices, num_out_tokens)
    assert torch.equal(got, tokens[order // 2][:rows])
    assert torch.equal(places.long(), torch.argsort(order))


def test_tokens_of_more_dimensions() -> None:
    tokens = torch.randn(3, 2, 4, requires_grad=True)
    indices = torch.tensor([1, 2, 0])
    rows, _ = ops.moe_token_permute(tokens, indices, 2)
    assert torch.equal(rows, tokens[[2, 0]])
    rows.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad[:, 0, 0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "indices", "attrs", "message"),
    [
        (torch.ones(2, 3), torch.zeros(3, 2).int(), {}, "indices: got dim 0 3, want 2"),
        (torch.ones(2, 3), torch.zeros(2, 2, 1).int(), {}, "indices: .* want 1 or 2 dimensions"),
        (torch.ones(2), torch.zeros(2).int(), {}, "tokens: .* want 2 dimensions or more"),
        (torch.ones(2, 3), torch.zeros(2, 513).int(), {}, "topK = 513, want in .1, 512"),
        (torch.ones(2, 3), torch.zeros(2, 2).short(), {}, "indices: got int16"),
        (torch.ones(2, 3).double(), torch.zeros(2, 2).int(), {}, "tokens: got float64"),
        (torch.ones(2, 3), torch.zeros(2, 2).int(), {"padded_mode": True}, "padded_mode: got True"),
        (torch.ones(1, 3), torch.tensor([[16777215]]), {}, "values from 16777215 to 16777215"),
        (torch.ones(1, 3), torch.tensor([[-1]]), {}, "values from -1 to -1"),
    ],
)
def test_bad_input(
    tokens: torch.Tensor, indices: torch.Tensor, attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(OpError, match=message):
        ops.moe_token_permute(tokens, indices, **attrs)


def test_too_many_copies_by_shape_alone() -> None:
    meta = torch.empty(1 << 20, 1, device="meta"), torch.empty(1 << 20, 16, device="meta").int()
    with pytest.raises(OpError, match=r"T \* topK = 16777216, want <= 16777214"):
        torch.ops.moe_graph.moe_token_permute(*meta)


def test_int8_ids_on_950_are_those_of_v3() -> None:
    tokens, indices = torch.ones(1, 3).to(torch.int8), torch.tensor([[10240]])
    ops.moe_token_permute(tokens, indices)
    with ops.use_product(Soc.ASCEND950), pytest.raises(OpError, match=r"want values in \[0, 10240"):
        ops.moe_token_permute(tokens, indices)


@pytest.mark.parametrize(
    ("shapes", "attrs", "want", "upstream"),
    [
        (([N, H], [N, K]), {}, [(N * K, H), (N * K,)], [(N * K, H), (N * K,)]),
        (([N, H], [N]), {}, [(N, H), (N,)], [(N, H), (N,)]),
        (
            ([N, 8], [N, 2]),
            {"num_out_tokens": 10},
            [(sympy.Min(10, 2 * N), 8), (2 * N,)],
            [(sympy.Min(10, 2 * N), 8), (2 * N,)],
        ),
        (
            ([N, 8], [N, 2]),
            {"num_out_tokens": -10},
            [(2 * N - sympy.Min(10, 2 * N), 8), (2 * N,)],
            [(2 * N - sympy.Min(10, 2 * N), 8), (2 * N,)],
        ),
        (([-1, -1], [-1, -1]), {}, [(-1, -1), (-1,)], [(1, -1), (1,)]),
        (([-2], [-2]), {}, [(-2,), (-1,)], [(-2,), (-1,)]),
        (([7, 5], [-2]), {}, [(-1, 5), (-1,)], [(7, 5), (-1,)]),
        (([7, 5], [-1, 2]), {}, [(-1, 5), (-1,)], [(7, 5), (-1,)]),
        (([0, 5], [0, 2]), {}, [(0, 5), (0,)], [(0, 5), (-1,)]),
    ],
)
def test_shapes(shapes: Any, attrs: Any, want: Any, upstream: Any) -> None:
    inputs = [(shapes[0], "float16"), (shapes[1], "int32")]
    assert infer_shape("MoeTokenPermute", inputs, attrs) == want
    assert infer_shape("MoeTokenPermute", inputs, attrs, upstream=True) == upstream


def _sequential(*rows: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, rows)


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_adds_in_order_on_a2(top_k: int, rows: int | None, dtype: torch.dtype) -> None:
    tokens, hidden = 5, 33
    copies = tokens * top_k
    places = torch.randperm(copies).to(torch.int32)
    full = order_sensitive((copies, hidden), top_k, dtype)
    full[rows:] = 0 if rows is not None else full[rows:]
    want = _sequential(*full.float()[places.long()].view(tokens, top_k, hidden).unbind(1))
    got = ops.moe_token_permute_grad(full[:rows], places, top_k)
    assert torch.equal(got, want.to(dtype))  # -0 + 0 is the one sum that a skipped row changes


@pytest.mark.parametrize("top_k", [2, 3, 8])
def test_gradient_is_that_of_init_routing_on_950(top_k: int) -> None:
    places = torch.randperm(5 * top_k).to(torch.int32)
    grad = order_sensitive((5 * top_k, 9), top_k, torch.float32)
    with ops.use_product(Soc.ASCEND950):
        for rows in (5 * top_k, 4):
            got = ops.moe_token_permute_grad(grad[:rows], places, top_k)
            want = ops.moe_init_routing_grad(grad[:rows], places, top_k, active_num=rows)
            assert_same_bits(got, want)
        assert ops.moe_token_permute_grad(grad[:0], places, top_k).eq(0).all()


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 2, 3, 8, 130]),
    st.sampled_from([1, 8, 17]),
    st.sampled_from(FLOATS),
    PRODUCTS,
    st.integers(0, 1000),
)
def test_gradient_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, soc: Soc, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(tokens * top_k, generator=generator).to(torch.int32)
    grad = order_sensitive((tokens * top_k, hidden), seed, dtype)
    attrs = {"num_topk": top_k}
    got, want = kernel_and_reference("MoeTokenPermuteGrad", [grad, places], attrs, soc)
    assert_same_bits(got[0], want[0])


@pytest.mark.parametrize("soc", list(Soc))
@pytest.mark.parametrize("num_out_tokens", [0, 5, 12, -4, -12])
@pytest.mark.parametrize("dtype", FLOATS)
def test_autograd(soc: Soc, num_out_tokens: int, dtype: torch.dtype) -> None:
    tokens = torch.randn(4, 6).to(dtype).requires_grad_()
    indices = routing(4, 3, 3, seed=2)
    with ops.use_product(soc):
        rows, _ = ops.moe_token_permute(tokens, indices, num_out_tokens)
        weights = torch.randn_like(rows)
        (rows * weights).sum().backward()
    wide = tokens.detach().double().requires_grad_()
    order = torch.sort(indices.flatten(), stable=True).indices[: rows.shape[0]]
    (wide[order // 3] * weights.double()).sum().backward()
    assert tokens.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(tokens.grad, wide.grad.to(dtype))


@pytest.mark.parametrize(
    ("grad", "places", "attrs", "message"),
    [
        (torch.ones(4, 2), torch.arange(4).int(), {"num_topk": 0}, "num_topk: got 0, want >= 1"),
        (torch.ones(4, 2), torch.arange(4).int(), {"num_topk": 3}, "want a multiple of 3"),
        (torch.ones(3, 2), torch.arange(4).int(), {"num_topk": 2}, "want a row for every index"),
        (torch.ones(4, 2), torch.arange(1, 5).int(), {"num_topk": 2}, "values from 1 to 4"),
        (torch.ones(4), torch.arange(4).int(), {"num_topk": 2}, "want 2 dimensions"),
        (torch.ones(4, 2), torch.arange(4), {"num_topk": 2}, "sorted_indices: got int64"),
        (torch.ones(4, 2), torch.arange(4).int(), {"num_topk": 2, "padded_mode": True}, "padded"),
        (torch.ones(0, 2), torch.arange(0).int(), {"num_topk": 513}, "topK = 513"),
    ],
)
def test_bad_gradient(
    grad: torch.Tensor, places: torch.Tensor, attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(OpError, match=message):
        torch.ops.moe_graph.moe_token_permute_grad(grad, places, **attrs)


def test_bad_gradient_of_the_public_function() -> None:
    grad, places = torch.ones(3, 2), torch.arange(4).int()
    with pytest.raises(OpError, match="padded_mode"):
        ops.moe_token_permute_grad(grad, places, 2, padded_mode=True)
    with pytest.raises(OpError, match="num_topk"):
        ops.moe_token_permute_grad(grad, places, 0)


def test_gradient_shapes() -> None:
    attrs = {"num_topk": 4}
    for rows, want in ((N * 4, N), (-1, -1), (16, 4), (18, 4)):
        inputs = [([rows, H], "bf16"), ([rows], "int32")]
        assert infer_shape("MoeTokenPermuteGrad", inputs, attrs) == [(want, H)]
    unknown = [([-2], "bf16"), ([-2], "int32")]
    assert infer_shape("MoeTokenPermuteGrad", unknown, attrs) == [(-1, -1)]


def test_one_graph_for_any_number_of_tokens() -> None:
    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def layer(tokens: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        rows, places = ops.moe_token_permute(tokens, indices, -2)
        return rows.tanh() + places.sum()

    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (4, 7, 30):
            tokens = torch.randn(count, 6, requires_grad=True)
            indices = routing(count, 2, 3, seed=count)
            torch._dynamo.mark_dynamic(tokens, 0)
            torch._dynamo.mark_dynamic(indices, 0)
            layer(tokens, indices).sum().backward()
            order = torch.sort(indices.flatten(), stable=True).indices[: 2 * count - 2]
            wide = tokens.detach().clone().requires_grad_()
            wide[order // 2].tanh().sum().backward()
            torch.testing.assert_close(tokens.grad, wide.grad)


def test_what_serves_on_950() -> None:
    def served(tokens: Any, indices: Any, num_out_tokens: int = 0) -> Any:
        attrs = {"num_out_tokens": num_out_tokens, "padded_mode": False}
        return served_by("MoeTokenPermute", [tokens, indices], attrs)

    found = served(torch.ones(3, 2), torch.ones(3, 4).int(), 5)
    assert (found.ge_type, found.attrs) == ("MoeInitRoutingV2", {"active_num": 5})
    assert found.inputs == (Source("tokens"), Source("indices"))
    assert served(torch.ones(3, 2), torch.ones(3, 4).int(), -5).attrs == {"active_num": 7}
    assert served(torch.ones(3, 2), torch.ones(3).int()).inputs[1] == Source("indices", True)
    found = served(torch.ones(3, 2).to(torch.int8), torch.ones(3))
    assert (found.ge_type, found.attrs["expert_num"]) == ("MoeInitRoutingV3", 10240)
    assert found.inputs[1] == Source("indices", True, torch.int32)
    for tokens, num_out_tokens, message in (
        (torch.ones(3, 2), -12, "so that rows are left"),
        (torch.ones(3, 2).to(torch.int8), 5, "MoeInitRoutingV3 keeps every row"),
        (torch.ones(3, 2, 2), 0, "want 2 dimensions"),
    ):
        with pytest.raises(OpError, match=message):
            served(tokens, torch.ones(3, 4).int(), num_out_tokens)


@pytest.mark.parametrize("num_out_tokens", [0, 5, 100, -5])
@pytest.mark.parametrize("flat", [False, True])
def test_the_serving_op_gives_the_same(num_out_tokens: int, flat: bool) -> None:
    tokens = torch.randn(9, 4)
    indices = routing(9, 1 if flat else 3, 4, seed=5)
    indices = indices.view(9) if flat else indices
    attrs = {"num_out_tokens": num_out_tokens, "padded_mode": False}
    served = served_by("MoeTokenPermute", [tokens, indices], attrs)
    with ops.use_product(Soc.ASCEND950):
        want = ops.moe_token_permute(tokens, indices, num_out_tokens)
        other = torch.ops.moe_graph.moe_init_routing_v2(tokens, indices.view(9, -1), **served.attrs)
    for at, expected in zip(served.outputs, want, strict=True):
        assert torch.equal(other[at], expected)


@pytest.mark.parametrize("num_out_tokens", [0, 3, -3])
def test_opcheck(num_out_tokens: int) -> None:
    arguments = (torch.randn(4, 3, requires_grad=True), routing(4, 2, 3, 0), num_out_tokens)
    torch.library.opcheck(torch.ops.moe_graph.moe_token_permute.default, arguments)
