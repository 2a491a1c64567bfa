"""The fp32 definition of fused attention, without a graph, against PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_graph.converters.attention import LANES, attention, attention_grad

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 5, 7, 8
CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 2, 3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def inputs(key_heads: int = HEADS, value_width: int = WIDTH) -> list[Tensor]:
    return [
        torch.randn(BATCH, HEADS, QUERIES, WIDTH),
        torch.randn(BATCH, key_heads, KEYS, WIDTH),
        torch.randn(BATCH, key_heads, KEYS, value_width),
    ]


def dropped(first_key_after: int) -> Tensor:
    """[QUERIES, KEYS], true where the fused op drops a key."""
    return torch.arange(KEYS) > torch.arange(QUERIES).unsqueeze(1) + first_key_after


# name -> arguments of the fused op, and the mask of keys that it drops
MASKS: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "none": ({}, None),
    "mask": ({"atten_mask": dropped(1)}, dropped(1)),
    "mask of bytes": ({"atten_mask": dropped(1).to(torch.uint8)}, dropped(1)),
    "mask per batch": (
        {"atten_mask": dropped(2).expand(BATCH, 1, QUERIES, KEYS)},
        dropped(2),
    ),
    "causal": (
        {"atten_mask": TRIANGLE, "sparse_mode": CAUSAL_TOP_LEFT, "next_tockens": 0},
        dropped(0),
    ),
    "causal from the end": (
        {"atten_mask": TRIANGLE, "sparse_mode": CAUSAL_BOTTOM_RIGHT, "next_tockens": 0},
        dropped(KEYS - QUERIES),
    ),
}


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("value_width", [8, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_results_and_gradients(mask: str, value_width: int, key_heads: int) -> None:
    options, drop = MASKS[mask]
    q, k, v = (each.requires_grad_() for each in inputs(key_heads, value_width))
    want = functional.scaled_dot_product_attention(
        q, k, v, None if drop is None else ~drop, scale=0.3, enable_gqa=True
    )
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), grad)

    with torch.no_grad():
        out, row_max, row_sum, *unused = attention(q, k, v, HEADS, "BNSD", scale=0.3, **options)
        got = attention_grad(
            q, k, v, grad, HEADS, "BNSD",
            softmax_max=row_max, softmax_sum=row_sum, attention_in=out, scale_value=0.3, **options,
        )  # fmt: skip

    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert row_max.shape == row_sum.shape == (BATCH, HEADS, QUERIES, LANES)
    assert [tuple(each.shape) for each in unused] == [(0,), (1,), (1,)]
    for one, other in zip(got[:3], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [each.numel() for each in got[3:]] == [0, 0]


def test_a_row_without_keys_stays_finite() -> None:
    q, k, v = inputs()
    mask = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    mask[2] = True
    out, row_max, row_sum, *_ = attention(q, k, v, HEADS, "BNSD", atten_mask=mask)
    assert all(each.isfinite().all() for each in (out, row_max, row_sum))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_is_left_to_the_converter(dtype: torch.dtype) -> None:
    q, k, v = (each.to(dtype) for each in inputs())
    assert attention(q, k, v, HEADS, "BNSD") is NotImplemented
    assert attention_grad(q, k, v, q, HEADS, "BNSD") is NotImplemented


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "input_layout": ({}, "got 'BSND', want 'BNSD'"),
    "keep_prob": ({"keep_prob": 0.5}, "got 0.5, want 1.0, no dropout"),
    "sparse_mode": ({"sparse_mode": 4}, "got 4, want 0, 2 or 3"),
    "pre_tockens": ({"pre_tockens": 5}, "got 5, want 2147483647, no window"),
    "next_tockens": ({"next_tockens": 0}, "got 0, want 2147483647, no window"),
    "pse": ({"pse": torch.zeros(1)}, "got a tensor, want None"),
    "padding_mask": ({"padding_mask": torch.zeros(1)}, "got a tensor, want None"),
    "prefix": ({"prefix": [1, 2]}, r"got \[1, 2\], want None"),
    "actual_seq_qlen": ({"actual_seq_qlen": torch.ones(2)}, "got a tensor, want None"),
    "actual_seq_kvlen": ({"actual_seq_kvlen": torch.ones(2)}, "got a tensor, want None"),
    "sink": ({"sink": torch.zeros(HEADS)}, "got a tensor, want None"),
}


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_what_has_no_lowering_is_refused_by_name(argument: str) -> None:
    options, message = UNSUPPORTED[argument]
    layout = "BSND" if argument == "input_layout" else "BNSD"
    q, k, v = inputs()
    rest = f"{argument}: {message}; .*attn_implementation='eager'"
    with pytest.raises(NotImplementedError, match=f"^npu_fusion_attention_v3: {rest}"):
        attention(q, k, v, HEADS, layout, **options)
    with pytest.raises(NotImplementedError, match=f"^npu_fusion_attention_grad_v3: {rest}"):
        attention_grad(q, k, v, q, HEADS, layout, **options)
