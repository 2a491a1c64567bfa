"""MoeTokenUnpermuteWithRoutingMap and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.ops import OpError, find, infer_shape
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference, order_sensitive
from tests.ops.routing_map_inputs import MIXED, error_of, map_of, permuted_indices
from tests.ops.test_symbolic import Symbols

UNPERMUTE, GRAD = "MoeTokenUnpermuteWithRoutingMap", "MoeTokenUnpermuteWithRoutingMapGrad"
DTYPES = st.sampled_from([*((dtype, dtype) for dtype in FLOATS), MIXED])
TOKENS, EXPERTS = st.sampled_from([0, 1, 2, 7]), st.sampled_from([1, 3, 4])
HIDDEN, SEEDS = st.sampled_from([1, 3, 16]), st.integers(0, 1000)
POISON = -1515870811


def _routed(tokens: int, experts: int, pad: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a map and the indices of its permutation."""
    top_k = 1 + seed % experts
    routing_map = map_of(tokens, experts, top_k, seed=seed, exact=seed % 2 == 0)
    rows = seed % (tokens + 1) * experts if pad else tokens * top_k
    return routing_map, permuted_indices(routing_map, rows, pad)


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
    routing_map, indices = _routed(tokens, experts, pad, seed)
    inputs = [
        order_sensitive((indices.shape[0], hidden), seed, dtypes[0]),
        indices,
        routing_map if seed % 3 else routing_map.to(torch.int8),
        order_sensitive((tokens, experts), seed + 1, dtypes[1]) if with_probs else None,
    ]
    attrs = {"drop_and_pad": pad, "restore_shape": () if with_probs else (tokens, hidden)}
    got, want = kernel_and_reference(UNPERMUTE, inputs, attrs, list(Soc)[seed % 3])
    for one, expected in zip(got, want, strict=True):
        assert_same_bits(one, expected)


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
    routing_map, indices = _routed(tokens, experts, pad, seed)
    token_id, out_index = torch.sort(indices, stable=True) if pad else (indices, indices)
    inputs = [
        order_sensitive((tokens, hidden), seed, dtypes[0]),
        out_index.to(torch.int32),
        token_id,
        routing_map if seed % 3 else routing_map.to(torch.int8),
        order_sensitive((indices.shape[0], hidden), seed + 1, dtypes[0]),
        order_sensitive((tokens, experts), seed + 2, dtypes[1]) if with_probs else None,
    ]
    got, want = kernel_and_reference(GRAD, inputs, {"drop_and_pad": pad}, list(Soc)[seed % 3])
    assert_same_bits(got[0], want[0])
    if with_probs:
        assert got[1] is not None
        # The order of the sum over H is the device's own; only its size is known.
        torch.testing.assert_close(got[1], want[1], rtol=2e-2, atol=1e-3)


def test_dropless_by_hand() -> None:
    routing_map = torch.tensor([[True, True], [False, True]])
    outputs = torch.ops.moe_graph.moe_token_unpermute_with_routing_map(
        torch.tensor([[1.0], [10.0], [100.0], [torch.nan]]),
        torch.tensor([0, 1, 2, -1], dtype=torch.int32),
        routing_map,
        torch.tensor([[0.5, 2.0], [9.0, 3.0]]),
    )
    unpermuted, out_index, token_id, probs = outputs
    assert unpermuted.view(-1).tolist() == [0.5 + 20, 300]
    assert probs[:3].tolist() == [0.5, 2, 3]
    assert probs[3].isnan()
    assert out_index.tolist() == token_id.tolist() == [POISON] * 4


def test_drop_and_pad_by_hand() -> None:
    outputs = torch.ops.moe_graph.moe_token_unpermute_with_routing_map(
        torch.tensor([[1.0], [10.0], [100.0], [1000.0]]),
        torch.tensor([1, 0, 1, 2], dtype=torch.int32),
        None,
        torch.tensor([[2.0, 9.0], [3.0, 4.0], [9.0, 5.0]]),
        True,
    )
    unpermuted, out_index, token_id, probs = outputs
    assert probs.tolist() == [3, 2, 4, 5]
    assert unpermuted.view(-1).tolist() == [20, 3 + 400, 5000]
    assert out_index.tolist() == [1, 0, 2, 3]
    assert token_id.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("pad", [False, True])
def test_it_undoes_the_permutation(pad: bool) -> None:
    tokens, experts, hidden = 6, 4, 5
    routing_map = map_of(tokens, experts, 3, seed=2, exact=False)
    x, probs = torch.randn(tokens, hidden), torch.rand(tokens, experts)
    rows, _, indices = ops.moe_token_permute_with_routing_map(
        x, routing_map, num_out_tokens=tokens * experts if pad else tokens * 3, drop_and_pad=pad
    )
    y = ops.moe_token_unpermute_with_routing_map(
        rows, indices, x.shape, probs=probs, routing_map=routing_map, drop_and_pad=pad
    )
    weights = probs if pad else probs * routing_map
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    y = ops.moe_token_unpermute_with_routing_map(rows, indices, x.shape, drop_and_pad=pad)
    counts = torch.full((tokens,), experts) if pad else routing_map.sum(1)
    torch.testing.assert_close(y, x * counts.unsqueeze(1))


def test_products_and_sums_round_once() -> None:
    rows = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16)
    y = ops.moe_token_unpermute_with_routing_map(
        rows,
        torch.tensor([0, 1], dtype=torch.int32),
        (1, 1),
        probs=torch.tensor([[1.0, 2.0 + 2.0**-11]]),
        routing_map=torch.tensor([[True, True]]),
    )
    # 1 + 2**-8 is half way between two bfloat16 values; the sum is just above it.
    assert y.item() == 1 + 2**-7


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), MIXED])
def test_gradients_against_float64_autograd(
    pad: bool, exact: bool, with_probs: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    tokens, experts, top_k, hidden = 6, 4, 3, 5
    routing_map = map_of(tokens, experts, top_k, seed=3, exact=exact)
    indices = permuted_indices(routing_map, experts * 2 if pad else tokens * top_k, pad)
    rows = order_sensitive((indices.shape[0], hidden), 1, dtypes[0]).requires_grad_()
    probs = order_sensitive((tokens, experts), 2, dtypes[1]).requires_grad_()
    weight = order_sensitive((tokens, hidden), 4, dtypes[0])
    y = ops.moe_token_unpermute_with_routing_map(
        rows,
        indices,
        (tokens, hidden),
        probs=probs if with_probs else None,
        routing_map=routing_map if with_probs else None,
        drop_and_pad=pad,
    )
    (y * weight).sum().backward()

    wide_rows, wide_probs = (t.detach().double().requires_grad_() for t in (rows, probs))
    if pad:
        token = indices.long()
        expert = torch.arange(experts).repeat_interleave(2)
    else:
        expert, token = routing_map.t().nonzero(as_tuple=True)
    used = token.shape[0]
    parts = wide_rows[:used] * (wide_probs[token, expert].unsqueeze(1) if with_probs else 1)
    want = torch.zeros((tokens, hidden), dtype=torch.float64).index_add(0, token, parts)
    (want * weight.double()).sum().backward()
    for ours, wide in ((rows, wide_rows), (probs, wide_probs)):
        if ours is probs and not with_probs:
            continue
        assert ours.grad is not None
        assert ours.grad.dtype == ours.dtype
        got, expected = ours.grad.double(), wide.grad
        if ours is rows:
            assert got[used:].isnan().all()
            got, expected = got[:used], expected[:used]
        rounding = 1e-5 if ours.dtype is torch.float32 else 2**-8
        torch.testing.assert_close(got, expected, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("pad", [False, True])
def test_few_tokens_train(tokens: int, pad: bool) -> None:
    rows = torch.ones(2 * tokens, 3, requires_grad=True)
    probs = torch.full((tokens, 2), 2.0, requires_grad=True)
    routing_map = torch.ones(tokens, 2, dtype=torch.bool)
    y = ops.moe_token_unpermute_with_routing_map(
        rows,
        permuted_indices(routing_map, 2 * tokens, pad),
        (tokens, 3),
        probs=probs,
        routing_map=routing_map,
        drop_and_pad=pad,
    )
    assert torch.equal(y, torch.full((tokens, 3), 4.0))
    y.sum().backward()
    assert torch.equal(rows.grad, torch.full((2 * tokens, 3), 2.0))
    assert torch.equal(probs.grad, torch.full((tokens, 2), 3.0))


def test_no_rows_give_zeros() -> None:
    y = ops.moe_token_unpermute_with_routing_map(
        torch.empty(0, 3),
        torch.empty(0, dtype=torch.int32),
        (2, 3),
        probs=torch.ones(2, 2),
        routing_map=torch.zeros(2, 2, dtype=torch.bool),
    )
    assert torch.equal(y, torch.zeros(2, 3))


def _call(**change: Any) -> Any:
    arguments: dict[str, Any] = {
        "permuted_tokens": torch.ones(8, 3),
        "sorted_indices": torch.arange(8, dtype=torch.int32),
        "restore_shape": (4, 3),
        "probs": torch.ones(4, 2),
        "routing_map": torch.ones(4, 2, dtype=torch.bool),
    } | change
    return ops.moe_token_unpermute_with_routing_map(**arguments)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"permuted_tokens": torch.ones(8)}, "permuted_tokens"),
        ({"permuted_tokens": torch.ones(9, 3)}, "sorted_indices"),
        ({"sorted_indices": torch.arange(8)}, "sorted_indices"),
        ({"sorted_indices": torch.arange(8, dtype=torch.int32).view(4, 2)}, "sorted_indices"),
        ({"sorted_indices": torch.full((8,), 8, dtype=torch.int32)}, "sorted_indices"),
        ({"sorted_indices": torch.full((8,), -2, dtype=torch.int32)}, "sorted_indices"),
        ({"drop_and_pad": True}, "sorted_indices"),
        ({"restore_shape": (), "probs": None}, "restore_shape"),
        ({"restore_shape": (4, 3, 1), "probs": None}, "restore_shape"),
        ({"restore_shape": (4, 4), "probs": None}, "restore_shape"),
        ({"restore_shape": (3, 3), "probs": None}, "sorted_indices"),
        ({"restore_shape": (5, 3)}, "restore_shape"),
        ({"restore_shape": (4,)}, "restore_shape"),
        ({"probs": torch.ones(4)}, "probs"),
        ({"probs": torch.ones(4, 2, dtype=torch.float16)}, "probs"),
        ({"routing_map": None}, "routing_map"),
        ({"routing_map": torch.ones(4, 3, dtype=torch.bool)}, "routing_map"),
        ({"routing_map": torch.full((4, 2), 3, dtype=torch.int8)}, "routing_map"),
        (
            {"routing_map": torch.ones(4, 3, dtype=torch.bool), "probs": torch.ones(4, 3)},
            "routing_map",
        ),
        (
            {"sorted_indices": torch.zeros(9, dtype=torch.int32), "drop_and_pad": True},
            "sorted_indices",
        ),
        (
            {"sorted_indices": torch.zeros(7, dtype=torch.int32), "drop_and_pad": True},
            "sorted_indices",
        ),
    ],
)
def test_bad_input(change: dict[str, Any], argument: str) -> None:
    assert error_of(_call, **change).argument == argument


def _grad(**change: Any) -> Any:
    indices = torch.arange(8, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "unpermuted_tokens_grad": torch.ones(4, 3),
        "out_index": indices,
        "permuted_token_id": indices // 2,
        "routing_map": torch.ones(4, 2, dtype=torch.bool),
        "permuted_tokens": torch.ones(8, 3),
        "probs": torch.ones(4, 2),
    } | change
    return ops.moe_token_unpermute_with_routing_map_grad(**arguments)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"unpermuted_tokens_grad": torch.ones(4, 3, dtype=torch.int8)}, "unpermuted_tokens_grad"),
        ({"unpermuted_tokens_grad": torch.ones(4)}, "unpermuted_tokens_grad"),
        ({"permuted_token_id": torch.zeros(7, dtype=torch.int32)}, "permute_token_id"),
        ({"permuted_tokens": None}, "permuted_tokens"),
        ({"permuted_tokens": torch.ones(8, 4)}, "permuted_tokens"),
        ({"permuted_tokens": torch.ones(7, 3)}, "permuted_tokens"),
        ({"routing_map": None}, "routing_map"),
        ({"routing_map": torch.ones(4, 3, dtype=torch.bool)}, "routing_map"),
        ({"routing_map": torch.eye(4, 2).to(torch.bool)}, "routing_map"),
        ({"probs": torch.ones(5, 2)}, "probs"),
        ({"out_index": torch.full((8,), 8, dtype=torch.int32)}, "out_index"),
        ({"out_index": torch.zeros(8, dtype=torch.int32)}, "out_index"),
        (
            {"permuted_token_id": torch.full((8,), 4, dtype=torch.int32), "drop_and_pad": True},
            "permute_token_id",
        ),
        (
            {"probs": torch.ones(4, 1), "routing_map": torch.ones(4, 1, dtype=torch.bool)},
            "out_index",
        ),
        (
            {"probs": torch.ones(4, 1), "routing_map": torch.ones(4, 1, dtype=torch.bool)}
            | {"drop_and_pad": True},
            "out_index",
        ),
    ],
)
def test_bad_input_of_the_gradient(change: dict[str, Any], argument: str) -> None:
    assert error_of(_grad, **change).argument == argument


@pytest.mark.parametrize("op", [UNPERMUTE, GRAD])
def test_top_k_is_limited(op: str) -> None:
    opdef = find(op)
    assert opdef is not None
    rows, index = ops.TensorSpec((1026, 3), torch.float32), ops.TensorSpec((1026,), torch.int32)
    of_tokens = ops.TensorSpec((2, 600), torch.float32)
    routing_map = ops.TensorSpec((2, 600), torch.int8)
    grad = ops.TensorSpec((2, 3), torch.float32)
    inputs = [rows, index, routing_map, of_tokens]
    if op == GRAD:
        inputs = [grad, index, index, routing_map, rows, of_tokens]
    with pytest.raises(OpError, match=r"= 513, want <= 512 on A2"):
        opdef.infer(inputs, opdef.bind_attrs({}), Soc.A2)


@pytest.mark.parametrize(
    ("experts", "hidden", "pad", "argument"),
    [
        (38688, 8, False, ""),
        (38720, 8, False, "probs"),
        (8, 4149930, True, ""),
        (8, 4149931, True, "unpermuted_tokens_grad"),
    ],
)
def test_what_the_gradient_keeps_in_the_buffer(
    experts: int, hidden: int, pad: bool, argument: str
) -> None:
    opdef = find(GRAD)
    assert opdef is not None
    grad, index = ops.TensorSpec((2, hidden), torch.float32), ops.TensorSpec((8,), torch.int32)
    probs = ops.TensorSpec((2, experts), torch.float32)
    routing_map = ops.TensorSpec((2, experts), torch.int8)
    rows = ops.TensorSpec((8, hidden), torch.float32)
    inputs = [grad, index, index, routing_map, rows, probs]
    attrs = opdef.bind_attrs({"drop_and_pad": pad})
    opdef.infer(inputs, attrs, Soc.ASCEND950)
    if argument:
        with pytest.raises(OpError, match=f"{argument}: .* on A2"):
            opdef.infer(inputs, attrs, Soc.A2)
    else:
        opdef.infer(inputs, attrs, Soc.A2)


def test_shapes_in_symbols_and_unknown() -> None:
    t, h, n = sympy.symbols("t h n", integer=True, positive=True)
    inputs: list[Any] = [([n, h], "bf16"), ([n], "int32"), None, ([t, 4], "float")]
    assert infer_shape(UNPERMUTE, inputs, {"drop_and_pad": True}) == [(t, h), (n,), (n,), (n,)]
    shapes = infer_shape(UNPERMUTE, inputs[:2], {"restore_shape": [5, 7]})
    assert shapes == [(5, h), (n,), (n,), None]
    unknown: list[Any] = [([-1, 8], "bf16"), ([-2], "int32"), None, ([-1, 4], "float")]
    assert infer_shape(UNPERMUTE, unknown, {}) == [(-1, 8), (-1,), (-1,), (-1,)]
    grads: list[Any] = [([t, h], "bf16"), ([n], "int32"), ([n], "int32")]
    assert infer_shape(GRAD, grads, {}) == [(n, h), None]
    grads += [([t, 4], "int8"), ([n, h], "bf16"), ([t, 4], "float")]
    assert infer_shape(GRAD, grads, {}) == [(n, h), (t, 4)]
    grads[:2] = [([-2], "bf16"), ([-1], "int32")]
    assert infer_shape(GRAD, grads, {}) == [(-1, -1), (t, 4)]


@pytest.mark.parametrize("pad", [False, True])
def test_any_token_count_adds_no_guard(pad: bool) -> None:
    symbols = Symbols()
    probs, routing_map = symbols.tensor(5, 4), symbols.tensor(5, 4, dtype=torch.bool)
    rows, indices = symbols.tensor(8, 6), symbols.tensor(8, dtype=torch.int32)
    with symbols.mode:
        probs, rows = probs.requires_grad_(), rows.requires_grad_()
        y = ops.moe_token_unpermute_with_routing_map(
            rows,
            indices,
            (probs.shape[0], 6),
            probs=probs,
            routing_map=routing_map,
            drop_and_pad=pad,
        )
        y.sum().backward()
    assert str(y.shape[0]) == str(probs.shape[0])
    assert rows.grad is not None
    assert str(rows.grad.shape[0]) == str(rows.shape[0])
    assert symbols.env.guards == []


def _layer(
    x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    rows, permuted_probs, indices = ops.moe_token_permute_with_routing_map(
        x, routing_map, probs=probs, num_out_tokens=8, drop_and_pad=True
    )
    assert permuted_probs is not None
    rows = rows * scale + permuted_probs.unsqueeze(1)
    return ops.moe_token_unpermute_with_routing_map(
        rows, indices, x.shape, probs=probs, routing_map=routing_map, drop_and_pad=True
    )


def test_one_graph_trains_any_token_count() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_layer, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (5, 3, 17):
        x, probs = torch.randn(tokens, 6), torch.rand(tokens, 4)
        routing_map = map_of(tokens, 4, 2, seed=tokens)
        grads = []
        for run in (_layer, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, probs, torch.full((6,), 0.5))]
            run(leaves[0], leaves[1], routing_map, leaves[2]).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("pad", [False, True])
def test_opcheck(pad: bool) -> None:
    routing_map = map_of(5, 4, 2, seed=1)
    indices = permuted_indices(routing_map, 8 if pad else 10, pad)
    token_id, out_index = torch.sort(indices, stable=True) if pad else (indices, indices)
    rows, probs = torch.randn(indices.shape[0], 6), torch.rand(5, 4)
    torch.library.opcheck(
        torch.ops.moe_graph.moe_token_unpermute_with_routing_map.default,
        (rows.clone().requires_grad_(), indices, routing_map, probs.clone().requires_grad_(), pad),
    )
    torch.library.opcheck(
        torch.ops.moe_graph.moe_token_unpermute_with_routing_map_grad.default,
        (
            torch.randn(5, 6),
            out_index.to(torch.int32),
            token_id,
            routing_map,
            rows,
            probs,
            pad,
        ),
    )


@pytest.mark.parametrize("pad", [False, True])
def test_on_the_device(pad: bool) -> None:
    routing_map = map_of(5, 4, 2, seed=1, exact=False)
    indices = permuted_indices(routing_map, 8 if pad else 10, pad)
    rows, probs = torch.randn(indices.shape[0], 6), torch.rand(5, 4)
    results = []
    for device in ("cpu", "npu"):
        leaves = [t.clone().to(device).requires_grad_() for t in (rows, probs)]
        y = ops.moe_token_unpermute_with_routing_map(
            leaves[0],
            indices.to(device),
            (5, 6),
            probs=leaves[1],
            routing_map=routing_map.to(device),
            drop_and_pad=pad,
        )
        y.sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for want, got in zip(*results, strict=True):
        assert want is not None
        assert got is not None
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)
