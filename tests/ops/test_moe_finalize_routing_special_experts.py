"""MoeFinalizeRoutingV2 with zero, copy and constant experts (Ascend 950)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.ops import OpError
from tests.ops.comparing import assert_same_bits, kernel_and_reference, order_sensitive, routing

EXPERTS = 8
RANGES = {
    "zero_expert_range": (2, 4),
    "copy_expert_range": (4, 5),
    "constant_expert_range": (6, 8),
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _inputs(
    tokens: int, top_k: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> dict[str, Any]:
    """Return every input, by name and in IR order; rows of copies without one are out of range."""
    dtype, scales_dtype = dtypes
    copies = tokens * top_k
    generator = torch.Generator().manual_seed(seed)
    experts = routing(tokens, top_k, EXPERTS, seed)
    row_idx = torch.randperm(copies, generator=generator).to(torch.int32)
    row_idx[experts.reshape(-1) >= 2] = -7
    row_idx[(experts.reshape(-1) == 5)] = 0
    return {
        "expanded_x": order_sensitive((copies, hidden), seed, dtype),
        "expanded_row_idx": row_idx,
        "x1": order_sensitive((tokens, hidden), seed + 1, dtype),
        "x2": None,
        "bias": order_sensitive((EXPERTS, hidden), seed + 3, dtype) if seed % 2 else None,
        "scales": order_sensitive((tokens, top_k), seed + 4, scales_dtype),
        "expert_idx": experts,
        "x": order_sensitive((tokens, hidden), seed + 5, dtype),
        "a1": order_sensitive((2, hidden), seed + 6, dtype),
        "a2": order_sensitive((2, hidden), seed + 7, dtype),
        "v": order_sensitive((2, hidden), seed + 8, dtype),
    }


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 3, EXPERTS]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(rows, scales) for rows in FLOATS for scales in FLOATS]),
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    inputs = _inputs(tokens, top_k, hidden, dtypes, seed)
    attrs = {"drop_pad_mode": 2, **RANGES}
    got, want = kernel_and_reference(
        "MoeFinalizeRoutingV2", list(inputs.values()), attrs, Soc.ASCEND950
    )
    assert_same_bits(got[0], want[0])


def test_one_copy_of_each_kind() -> None:
    with ops.use_product(Soc.ASCEND950):
        y = ops.moe_finalize_routing(
            torch.tensor([[1.0], [torch.nan], [torch.nan], [torch.nan]]),
            torch.tensor([0, 9, 9, 9], dtype=torch.int32),
            bias=torch.tensor([[100.0], [torch.nan], [300.0], [400.0]]),
            scales=torch.tensor([[2.0, 3.0, 4.0, 5.0]]),
            expert_idx=torch.tensor([[0, 1, 2, 3]], dtype=torch.int32),
            drop_pad_mode=2,
            x=torch.tensor([[10.0]]),
            a1=torch.tensor([[0.5]]),
            a2=torch.tensor([[0.25]]),
            v=torch.tensor([[8.0]]),
            zero_expert_range=(1, 2),
            copy_expert_range=(2, 3),
            constant_expert_range=(3, 4),
        )
    assert y.item() == 2 * 101 + 4 * 310 + 5 * (5 + 2 + 400)


def test_dropped_copies_beside_special_experts() -> None:
    with ops.use_product(Soc.ASCEND950):
        y = ops.moe_finalize_routing(
            torch.tensor([[[1.0]], [[torch.nan]]]),
            torch.tensor([0, -1, -1], dtype=torch.int32),
            scales=torch.ones(1, 3),
            expert_idx=torch.tensor([[0, 1, 2]], dtype=torch.int32),
            drop_pad_mode=3,
            x=torch.tensor([[10.0]]),
            copy_expert_range=(2, 3),
        )
    assert y.item() == 11


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"copy_expert_range": (3, 5)}, "copy_expert_range"),
        ({"zero_expert_range": (2, 2)}, "zero_expert_range"),
        ({"zero_expert_range": (-1, 2)}, "zero_expert_range"),
        ({"zero_expert_range": (2,)}, "zero_expert_range"),
        ({"constant_expert_range": (6, 9)}, "constant_expert_range"),
        ({"constant_expert_range": (7, 8)}, "a1"),
        ({"x": None}, "x"),
        ({"v": None}, "v"),
        ({"x": torch.ones(5, 8)}, "x"),
        ({"a2": torch.ones(2, 9)}, "a2"),
        ({"expert_idx": None, "bias": None}, "expert_idx"),
        ({"expert_idx": torch.full((6, 3), -2, dtype=torch.int32)}, "expanded_row_idx"),
    ],
)
def test_bad_input(change: dict[str, Any], argument: str) -> None:
    arguments = _inputs(6, 3, 8, (torch.float32, torch.float32), seed=1) | RANGES | change
    with ops.use_product(Soc.ASCEND950), pytest.raises(OpError) as caught:
        ops.moe_finalize_routing(**arguments, drop_pad_mode=2)
    assert caught.value.argument == argument


@pytest.mark.parametrize("soc", [Soc.A2, Soc.A3])
def test_only_950_has_such_experts(soc: Soc) -> None:
    arguments = _inputs(6, 3, 8, (torch.float32, torch.float32), seed=1)
    with ops.use_product(soc), pytest.raises(OpError, match=f"x: .* want nothing on {soc.value}"):
        ops.moe_finalize_routing(**arguments, drop_pad_mode=2)
    arguments |= dict.fromkeys(("x", "a1", "a2", "v"))
    with ops.use_product(soc), pytest.raises(OpError, match=f"no such experts.* on {soc.value}"):
        ops.moe_finalize_routing(**arguments, drop_pad_mode=2, zero_expert_range=(2, 4))


def test_no_gradient_with_such_experts() -> None:
    arguments = _inputs(6, 3, 8, (torch.float32, torch.float32), seed=1)
    arguments["expanded_x"].requires_grad_()
    with ops.use_product(Soc.ASCEND950):
        y = ops.moe_finalize_routing(**arguments, **RANGES, drop_pad_mode=2)
        with pytest.raises(NotImplementedError, match="does not know such experts"):
            y.sum().backward()
