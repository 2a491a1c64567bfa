"""FlashAttentionScore and its gradient, through TorchAir, against PyTorch's own attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from through_torchair import assert_same, compiled
from torch import Tensor

B, N, SQ, SKV, D = 2, 4, 5, 7, 8
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}
#: the mask that the causal sparse modes want: a triangle, True = left out
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def to_layout(x: Tensor, layout: str) -> Tensor:
    """Store [B, N, S, D] in a layout."""
    if layout == "BNSD":
        return x
    return x.transpose(1, 2).flatten(2)


def fused(layout: str, **options: object) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return torch.ops.npu.npu_fusion_attention(
            q, k, v, N, layout, atten_mask=mask, scale=D**-0.5, **options
        )[0]

    return run


def plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """PyTorch's attention on [B, N, S, D]; `keep` True = attend."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, keep)


def compare(
    dtype: torch.dtype,
    layout: str,
    kv_heads: int,
    mask: Tensor | None,
    keep: Tensor | None,
    **options: object,
) -> None:
    torch.manual_seed(0)
    shapes = ((B, N, SQ, D), (B, kv_heads, SKV, D), (B, kv_heads, SKV, D))
    exact = [torch.randn(shape).to(dtype).float().requires_grad_() for shape in shapes]
    weight = torch.randn(B, N, SQ, D).to(dtype)
    want = plain(*exact, keep)
    (want * weight.float()).sum().backward()

    inputs = [
        to_layout(x.detach(), layout).to(dtype).contiguous().npu().requires_grad_() for x in exact
    ]
    got = compiled(fused(layout, **options))(*inputs, None if mask is None else mask.npu())
    (got * to_layout(weight, layout).npu()).sum().backward()

    tolerance = TOLERANCE[dtype]
    assert_same(got.detach(), to_layout(want.detach(), layout).to(dtype), tolerance)
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_same(x.grad, to_layout(y.grad, layout).to(dtype), tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_without_mask(dtype: torch.dtype, layout: str) -> None:
    compare(dtype, layout, N, None, None)


@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_shared_key_value_heads(layout: str) -> None:
    compare(torch.float32, layout, 2, None, None)


def test_mask_of_the_caller() -> None:
    mask = torch.rand(B, 1, SQ, SKV) > 0.6
    mask[..., 0] = False
    compare(torch.float32, "BNSD", 2, mask, ~mask)


@pytest.mark.parametrize(("mode", "diagonal"), [(2, 0), (3, SKV - SQ)])
def test_causal(mode: int, diagonal: int) -> None:
    """Mode 2 aligns the triangle to the upper left corner, mode 3 to the lower right one."""
    keep = torch.ones(SQ, SKV, dtype=torch.bool).tril(diagonal)
    compare(torch.float32, "BNSD", 2, TRIANGLE, keep, sparse_mode=mode)


def test_band() -> None:
    distance = torch.arange(SKV) - torch.arange(SQ).unsqueeze(1)
    keep = (distance >= -1) & (distance <= 2)
    mask = torch.zeros(SQ, SKV, dtype=torch.bool)
    compare(torch.float32, "BNSD", 2, mask, keep, pre_tockens=1, next_tockens=2)


def test_statistics_of_the_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, N, SQ, D), torch.randn(B, N, SKV, D), torch.randn(B, N, SKV, D)
    run = compiled(
        lambda q, k, v: torch.ops.npu.npu_fusion_attention(q, k, v, N, "BNSD", scale=0.5)[1:3]
    )
    scores = q @ k.transpose(-1, -2) * 0.5
    peak = scores.amax(-1, keepdim=True)
    total = (scores - peak).exp().sum(-1, keepdim=True)
    assert_same(run(q.npu(), k.npu(), v.npu()), [x.expand(B, N, SQ, 8) for x in (peak, total)])


def test_what_is_not_emulated_is_refused() -> None:
    q = torch.randn(B, N, SQ, D).npu()
    program = compiled(fused("BNSD", sparse_mode=2))
    with pytest.raises(RuntimeError, match=r"FlashAttentionScore.*atten_mask: got nothing"):
        program(q, q, q, None)
