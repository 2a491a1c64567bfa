"""MoeFinalizeRoutingV2 and MoeFinalizeRoutingV2Grad."""

from __future__ import annotations

from typing import Any

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

SEEDS = st.integers(0, 1000)
COLUMN_MODES, DROP_MODES = (0, 1), (1, 3)


def _row_idx(copies: int, rows: int, drops: bool, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row_idx = torch.randperm(rows, generator=generator)[:copies].to(torch.int32)
    if drops:
        row_idx = torch.where(torch.rand(copies, generator=generator) < 0.3, -1, row_idx)
    return row_idx


def _inputs(
    mode: int,
    tokens: int,
    top_k: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> dict[str, Any]:
    """Return every input of MoeFinalizeRoutingV2, by name and in IR order."""
    experts = 4
    dtype, scales_dtype = dtypes
    copies = tokens * top_k
    drops = mode in DROP_MODES
    capacity = copies // 2 + 1
    shape = (experts, capacity, hidden) if drops else (copies, hidden)
    rows = experts * capacity if drops else copies
    return {
        "expanded_x": order_sensitive(shape, seed, dtype),
        "expanded_row_idx": _row_idx(copies, rows, drops, seed),
        "x1": order_sensitive((tokens, hidden), seed + 1, dtype),
        "x2": order_sensitive((tokens, hidden), seed + 2, dtype),
        "bias": order_sensitive((experts, hidden), seed + 3, dtype),
        "scales": order_sensitive((tokens, top_k), seed + 4, scales_dtype),
        "expert_idx": routing(tokens, top_k, experts, seed),
    }


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(rows, scales) for rows in FLOATS for scales in FLOATS]),
    st.sets(st.sampled_from(["x1", "x2", "bias", "scales"])),
    st.sampled_from(list(Soc)),
    SEEDS,
)
def test_kernel_is_the_definition(
    mode: int,
    tokens: int,
    top_k: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    given_inputs: set[str],
    soc: Soc,
    seed: int,
) -> None:
    mixed = dtypes[0] != dtypes[1] and dtypes != (torch.bfloat16, torch.float32)
    soc = Soc.ASCEND950 if mixed else soc
    inputs = _inputs(mode, tokens, top_k, hidden, dtypes, seed)
    for name in ("x1", "x2", "bias", "scales"):
        if name not in given_inputs:
            inputs[name] = None
    if inputs["x1"] is None:
        inputs["x2"] = None
    attrs = {"drop_pad_mode": mode, "k": top_k}
    got, want = kernel_and_reference("MoeFinalizeRoutingV2", list(inputs.values()), attrs, soc)
    assert_same_bits(got[0], want[0])


def _eager(inputs: dict[str, Any], mode: int) -> torch.Tensor:
    """The formula of the aclnn page, in plain PyTorch and float64."""
    wide = {
        name: value.double() if value is not None and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    tokens, top_k = wide["scales"].shape
    rows = wide["expanded_x"].reshape(-1, wide["expanded_x"].shape[-1])
    index = wide["expanded_row_idx"].long()
    index = index.view(top_k, tokens).t() if mode in COLUMN_MODES else index.view(tokens, top_k)
    parts = rows[index.clamp(min=0)] + wide["bias"][wide["expert_idx"].long()]
    parts = parts * wide["scales"].unsqueeze(-1) * (index >= 0).unsqueeze(-1)
    return wide["x1"] + wide["x2"] + parts.sum(1)


@pytest.mark.parametrize("mode", range(4))
def test_forward_against_the_formula(mode: int) -> None:
    inputs = _inputs(mode, 6, 3, 8, (torch.float32, torch.float32), seed=5)
    y = ops.moe_finalize_routing(**inputs, drop_pad_mode=mode)
    torch.testing.assert_close(y, _eager(inputs, mode).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_against_float64_autograd(mode: int, mixed: bool) -> None:
    dtypes = (torch.bfloat16, torch.float32) if mixed else (torch.float32, torch.float32)
    inputs = _inputs(mode, 6, 3, 8, dtypes, seed=6)
    names = [name for name, value in inputs.items() if value.is_floating_point()]
    ours = {n: v.clone().requires_grad_(n in names) for n, v in inputs.items()}
    wide = {
        n: (v.double() if n in names else v).clone().requires_grad_(n in names)
        for n, v in inputs.items()
    }
    weights = order_sensitive((6, 8), 7, dtypes[0])
    (ops.moe_finalize_routing(**ours, drop_pad_mode=mode) * weights).sum().backward()
    (_eager(wide, mode) * weights.double()).sum().backward()
    for name in names:
        assert ours[name].grad.dtype == inputs[name].dtype
        rounding = 1e-5 if inputs[name].dtype is torch.float32 else 2**-8
        torch.testing.assert_close(
            ours[name].grad.double(), wide[name].grad, rtol=rounding, atol=1e-3, msg=name
        )


def test_gradient_without_scales() -> None:
    tokens, top_k = 4, 3
    expanded = torch.randn(tokens * top_k, 5, requires_grad=True)
    row_idx = _row_idx(tokens * top_k, tokens * top_k, False, seed=1)
    y = ops.moe_finalize_routing(expanded, row_idx, drop_pad_mode=2, k=top_k)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    want = torch.zeros_like(expanded)
    want[row_idx.long()] = weights.repeat_interleave(top_k, 0)
    torch.testing.assert_close(expanded.grad, want)


def test_bf16_rows_with_fp32_scales_round_once() -> None:
    rows = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16)
    row_idx = torch.tensor([0, 1], dtype=torch.int32)
    scales = torch.tensor([[1.0, 2.0]])
    # 1 + 2**-8 is half way between two bfloat16 values; 1 + 2**-8 + 2**-20 is above it.
    y = ops.moe_finalize_routing(rows, row_idx, scales=scales, drop_pad_mode=2)
    assert y.item() == 1.0
    scales[0, 1] += 2.0**-11
    y = ops.moe_finalize_routing(rows, row_idx, scales=scales, drop_pad_mode=2)
    assert y.item() == 1.0 + 2**-7


def test_fp16_sums_in_fp16_on_a2_only() -> None:
    rows = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    row_idx = torch.arange(3, dtype=torch.int32)
    scales = torch.ones(1, 3, dtype=torch.float16)
    y = ops.moe_finalize_routing(rows, row_idx, scales=scales, drop_pad_mode=2)
    assert y.item() == 2048
    with ops.use_product(Soc.ASCEND950):
        y = ops.moe_finalize_routing(rows, row_idx, scales=scales, drop_pad_mode=2)
    assert y.item() == 2050


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["dropless", "active", "drop_pad", "no_scales"]),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
    SEEDS,
)
def test_gradient_kernel_is_the_definition(
    mode: str, tokens: int, top_k: int, hidden: int, with_bias: bool, seed: int
) -> None:
    experts, dtype = 4, FLOATS[seed % 3]
    soc = list(Soc)[seed % 2 * 2]
    scales_dtype = FLOATS[seed // 6 % 3] if soc is Soc.ASCEND950 else dtype
    top_k = 1 if mode == "no_scales" else top_k
    tokens = max(tokens, 1) if mode in ("active", "drop_pad") else tokens
    copies = tokens * top_k
    attrs: dict[str, int] = {}
    shape: tuple[int, ...] = (copies, hidden)
    rows = copies
    if mode == "active":
        attrs["active_num"] = max(1, copies // 2)
        shape = (attrs["active_num"], hidden)
    if mode == "drop_pad":
        attrs |= {"drop_pad_mode": 1, "expert_num": experts, "expert_capacity": copies}
        shape = (experts, copies, hidden)
        rows = experts * copies
    row_idx = _row_idx(copies, rows, mode == "drop_pad", seed)
    scaled = mode != "no_scales"
    inputs = [
        order_sensitive((tokens, hidden), seed, dtype),
        row_idx,
        order_sensitive(shape, seed + 1, dtype) if scaled else None,
        order_sensitive((tokens, top_k), seed + 2, scales_dtype) if scaled else None,
        routing(tokens, top_k, experts, seed) if with_bias and scaled else None,
        order_sensitive((experts, hidden), seed + 3, dtype) if with_bias and scaled else None,
    ]
    got, want = kernel_and_reference("MoeFinalizeRoutingV2Grad", inputs, attrs, soc)
    assert_same_bits(got[0], want[0])
    # The order of the sum over H is the device's own; only its size is known.
    torch.testing.assert_close(got[1], want[1], rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x1": None}, "x1"),
        ({"expert_idx": None}, "expert_idx"),
        ({"scales": torch.ones(6, 2)}, "expert_idx"),
        ({"scales": None, "k": 3, "expert_idx": torch.zeros(6, 2).int()}, "expert_idx"),
        ({"bias": torch.ones(4, 9)}, "bias"),
        ({"x1": torch.ones(5, 8)}, "x1"),
        ({"x1": torch.ones(6, 8, dtype=torch.float16)}, "x1"),
        ({"expanded_row_idx": torch.zeros(18, dtype=torch.int64)}, "expanded_row_idx"),
        ({"expanded_row_idx": torch.full((18,), 18, dtype=torch.int32)}, "expanded_row_idx"),
        ({"expanded_row_idx": torch.full((18,), -1, dtype=torch.int32)}, "expanded_row_idx"),
        ({"expert_idx": torch.full((6, 3), 4, dtype=torch.int32)}, "expert_idx"),
        ({"drop_pad_mode": 4}, "drop_pad_mode"),
        ({"k": 2}, "scales"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], argument: str) -> None:
    inputs = _inputs(2, 6, 3, 8, (torch.float32, torch.float32), seed=0)
    with pytest.raises(OpError) as caught:
        ops.moe_finalize_routing(**{**inputs, "drop_pad_mode": 2, **change})
    assert caught.value.op == "MoeFinalizeRoutingV2"
    assert caught.value.argument == argument
    assert caught.value.got
    assert caught.value.want
