"""MoeInitRouting, MoeInitRoutingQuant and MoeInitRoutingQuantV2, by hand and by definition."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import OpError, infer_shape
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference, routing

_ops = torch.ops.moe_graph

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
IDS = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32)
K_MAJOR = torch.arange(6, dtype=torch.int32).reshape(2, 3).T.contiguous()


def test_the_first_version_numbers_copies_k_major() -> None:
    rows, row_idx, ids = _ops.moe_init_routing(X, K_MAJOR, IDS, 3)
    # Copies (token, k): expert 0 has (0, 1), (2, 0); 1 has (1, 0), (2, 1); 2 has (0, 0), (1, 1).
    assert rows[:, 0].tolist() == [1.0, 5.0, 3.0, 5.0, 1.0, 3.0]
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert row_idx.tolist() == [4, 2, 1, 0, 5, 3]


def test_active_num_counts_tokens() -> None:
    rows, row_idx, _ = _ops.moe_init_routing(X, K_MAJOR, IDS, 1)
    assert rows.shape == (2, 2)
    assert row_idx.shape == (6,)


def test_quantised_rows() -> None:
    rows, *_ = _ops.moe_init_routing_quant(X, K_MAJOR, IDS, 3, 50.0, 0.5)
    assert rows.dtype is torch.int8
    assert rows[0].tolist() == [50, 100]  # 50.5 and 100.5 round to even
    assert rows[1].tolist() == [127, 127]


def test_static_rows_of_the_second_version() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    rows, row_idx, _, _, scales = _ops.moe_init_routing_quant_v2(X, IDS, one, zero)
    assert rows[:, 0].tolist() == [1, 5, 3, 5, 1, 3]
    assert row_idx.tolist() == [4, 0, 2, 5, 1, 3]
    assert scales.shape == (0,)


def test_dynamic_rows_with_dropping_and_padding() -> None:
    rows, row_idx, _, before, scales = _ops.moe_init_routing_quant_v2(
        X,
        IDS,
        expert_capacity=1,
        expert_num=4,
        drop_pad_mode=1,
        expert_tokens_before_capacity_flag=True,
        quant_mode=1,
    )
    assert rows[:, 0, 1].tolist() == [127, 127, 127, 0]
    assert row_idx.tolist() == [2, 0, 1, -1, -1, -1]
    assert before.tolist() == [2, 2, 2, 0]
    assert scales[:3].tolist() == (torch.tensor([2.0, 4.0, 2.0]) / 127).tolist()
    assert scales[3].isnan()


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    tokens, top_k = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    experts, hidden = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 8]))
    seed = draw(st.integers(0, 1000))
    ids = routing(tokens, top_k, experts, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(draw(st.sampled_from(FLOATS)))
    op = draw(st.sampled_from(["MoeInitRouting", "MoeInitRoutingQuant", "MoeInitRoutingQuantV2"]))
    active = draw(st.sampled_from([0, 1, 3, 100]))
    if op != "MoeInitRoutingQuantV2":
        numbers = torch.randperm(tokens * top_k, generator=generator).to(torch.int32)
        quantised = op == "MoeInitRoutingQuant"
        attrs: dict[str, Any] = {"scale": 37.3, "offset": -0.25} if quantised else {}
        return op, [x, numbers.view(tokens, top_k), ids], attrs | {"active_num": active}
    dynamic, drop_pad = draw(st.booleans()), tokens > 0 and draw(st.booleans())
    scale, offset = torch.tensor([37.3]), torch.tensor([-0.25])
    if dynamic:
        rows = draw(st.sampled_from([1, experts]))
        scale = torch.rand(rows, hidden, generator=generator)
    attrs = {
        "active_num": active,
        "expert_num": experts,
        "expert_capacity": draw(st.integers(1, tokens)) if drop_pad else 0,
        "drop_pad_mode": int(drop_pad),
        "expert_tokens_count_or_cumsum_flag": 0 if drop_pad else draw(st.integers(0, 2)),
        "expert_tokens_before_capacity_flag": drop_pad,
        "quant_mode": int(dynamic),
    }
    return op, [x, ids, scale, None if dynamic else offset], attrs


@settings(max_examples=250, deadline=None)
@given(calls())
def test_the_kernel_is_the_definition(call: tuple[str, list[Any], dict[str, Any]]) -> None:
    got, want = kernel_and_reference(*call)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "argument"),
    [
        ("moe_init_routing", (X, K_MAJOR, IDS), {"active_num": -1}, "active_num"),
        ("moe_init_routing", (X, K_MAJOR[:2], IDS), {"active_num": 1}, "row_idx"),
        ("moe_init_routing", (X, K_MAJOR, IDS[:, :1]), {"active_num": 1}, "expert_idx"),
        ("moe_init_routing", (X, K_MAJOR + 1, IDS), {"active_num": 1}, "row_idx"),
        ("moe_init_routing", (X, K_MAJOR, IDS - 1), {"active_num": 1}, "expert_idx"),
        ("moe_init_routing_quant_v2", (X, IDS), {}, "scale"),
        ("moe_init_routing_quant_v2", (X, IDS, torch.ones(1)), {}, "offset"),
        ("moe_init_routing_quant_v2", (X, IDS, torch.ones(2, 2)), {"quant_mode": 1}, "scale"),
        ("moe_init_routing_quant_v2", (X, IDS, torch.ones(1, 3)), {"quant_mode": 1}, "scale"),
        ("moe_init_routing_quant_v2", (X, IDS), {"quant_mode": 2}, "quant_mode"),
    ],
)
def test_errors_name_the_argument(
    op: str, inputs: tuple[torch.Tensor, ...], attrs: dict[str, Any], argument: str
) -> None:
    with pytest.raises(OpError) as raised:
        getattr(_ops, op)(*inputs, **attrs)
    assert raised.value.argument == argument


def test_no_gradient_and_the_reason() -> None:
    rows = _ops.moe_init_routing(X.clone().requires_grad_(), K_MAJOR, IDS, 3)[0]
    with pytest.raises(NotImplementedError, match="V2"):
        rows.sum().backward()


def test_symbolic_sizes() -> None:
    tokens = sympy.Symbol("T", integer=True, positive=True)
    inputs = [([tokens, 8], "float16"), ([tokens, 2], "int32"), ([tokens, 2], "int32")]
    rows, row_idx, ids = infer_shape("MoeInitRouting", inputs, {"active_num": 5})
    assert rows == (2 * sympy.Min(5, tokens), 8)
    assert row_idx == ids == (2 * tokens,)


def test_a_shape_needs_no_attribute_that_the_rule_does_not_read() -> None:
    inputs = [([4, 8], "float16"), ([4, 2], "int32"), ([4, 2], "int32")]
    assert infer_shape("MoeInitRoutingQuant", inputs, {"active_num": 3})[0] == (6, 8)
    with pytest.raises(OpError, match="active_num: got nothing"):
        infer_shape("MoeInitRoutingQuant", inputs, {})
