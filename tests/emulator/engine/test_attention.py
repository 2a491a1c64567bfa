"""FlashAttentionScore and its gradient against PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ge_graphs import ge, run_ge
from through_torchair import assert_same, compiled
from torch import Tensor

B, N, SQ, SKV, D = 2, 4, 5, 7, 8
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}
#: the mask that the causal sparse modes want: a triangle, True = left out
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
NOT_FED = dict.fromkeys(
    ("drop_mask", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "q_start_idx",
     "kv_start_idx")
)  # fmt: skip


def to_layout(x: Tensor, layout: str) -> Tensor:
    """Store [B, N, S, D] in a layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.permute(2, 0, 1, 3).flatten(2)


def fused(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, mask: Tensor | None, layout: str, **options: int
) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, from two GE nodes."""
    common = {"scale_value": D**-0.5, "head_num": N, "input_layout": layout, **options}

    def build(q: Any, k: Any, v: Any, dy: Any, mask: Any = None) -> list[Any]:
        peak, total, _, out = ge.FlashAttentionScore(
            q, k, v, atten_mask=mask, real_shift=None, **NOT_FED, **common
        )
        grads = ge.FlashAttentionScoreGrad(
            q, k, v, dy, atten_mask=mask, softmax_max=peak, softmax_sum=total, attention_in=out,
            pse_shift=None, softmax_in=None, **NOT_FED, **{"next_tockens": 2147483647, **common},
        )  # fmt: skip
        return [out, *grads[:3]]

    return run_ge(build, q, k, v, dy, *([] if mask is None else [mask]))


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
    **options: int,
) -> None:
    torch.manual_seed(0)
    shapes = ((B, N, SQ, D), (B, kv_heads, SKV, D), (B, kv_heads, SKV, D))
    exact = [torch.randn(shape).to(dtype).float().requires_grad_() for shape in shapes]
    dy = torch.randn(B, N, SQ, D).to(dtype)
    out = plain(*exact, keep)
    out.backward(dy.float())
    want = [out.detach(), *(each.grad for each in exact)]
    inputs = [to_layout(each.detach().to(dtype), layout).contiguous() for each in (*exact, dy)]
    got = fused(*inputs, mask, layout, **options)
    assert_same(got, [to_layout(each.to(dtype), layout) for each in want], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_mask(dtype: torch.dtype) -> None:
    compare(dtype, "BNSD", N, None, None)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_layouts_with_shared_key_value_heads(layout: str) -> None:
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


def test_a_row_without_keys_gives_zero() -> None:
    mask = torch.zeros(SQ, SKV, dtype=torch.bool)
    mask[1] = True
    q, k, v = torch.randn(B, N, SQ, D), torch.randn(B, N, SKV, D), torch.randn(B, N, SKV, D)
    for result in fused(q, k, v, torch.randn(B, N, SQ, D), mask, "BNSD"):
        assert result.isfinite().all()
    assert (fused(q, k, v, q, mask, "BNSD")[0][:, :, 1] == 0).all()


def test_statistics_of_the_softmax_through_torchair() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, N, SQ, D), torch.randn(B, N, SKV, D), torch.randn(B, N, SKV, D)
    run = compiled(
        lambda q, k, v: torch.ops.npu.npu_fusion_attention(q, k, v, N, "BNSD", scale=0.5)[:3]
    )
    scores = q @ k.transpose(-1, -2) * 0.5
    peak = scores.amax(-1, keepdim=True)
    total = (scores - peak).exp().sum(-1, keepdim=True)
    statistics = [each.expand(B, N, SQ, 8) for each in (peak, total)]
    assert_same(run(q.npu(), k.npu(), v.npu()), [scores.softmax(-1) @ v, *statistics])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_mode": 2}, "atten_mask: got nothing, want a mask with sparse_mode 2"),
        ({"sparse_mode": 7}, "sparse_mode: got 7, want 0 to 4"),
        ({"keep_prob": 0.9}, "keep_prob: got 0.8.*, want 1.0"),
        ({"head_num": 3}, "head_num: got 3, want 4"),
    ],
)
def test_what_is_not_emulated_is_refused(options: dict[str, Any], message: str) -> None:
    q = torch.randn(B, N, SQ, D)
    with pytest.raises(RuntimeError, match=f"GE op FlashAttentionScore .*{message}"):
        fused(q, q, q, q, None, "BNSD", **options)
