"""``scaled_dot_product_attention`` on NPU tensors, which torch_npu makes a fusion attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_npu

from moe_graph.emulator.eager_attention import AttentionError

LENGTH, SIZE = 7, 16


def inputs(query_heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        torch.randn(2, heads, LENGTH, SIZE).to(dtype) for heads in (query_heads, kv_heads, kv_heads)
    ]


def padding_mask() -> torch.Tensor:
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False
    mask[1, :, :2, :] = True  # no row without a position: PyTorch leaves those undefined
    return mask


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": padding_mask()},
    "one mask for all": {"attn_mask": padding_mask()[0, 0]},
    "float mask": {"attn_mask": torch.linspace(-2, 2, LENGTH).expand(2, 1, LENGTH, LENGTH)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_the_definition(variant: str, kv_heads: int, dtype: torch.dtype) -> None:
    """Forward and backward against the fp32 result of the CPU, rounded to the dtype."""
    options = dict(VARIANTS[variant], enable_gqa=kv_heads != 4)
    tensors = inputs(4, kv_heads, dtype)
    on_cpu = [x.clone().float().requires_grad_() for x in tensors]
    on_npu = [x.npu().requires_grad_() for x in tensors]
    cpu_options, npu_options = dict(options), dict(options)
    if "attn_mask" in options and options["attn_mask"].dtype != torch.bool:
        npu_options["attn_mask"] = options["attn_mask"].to(dtype).npu()
        cpu_options["attn_mask"] = options["attn_mask"].to(dtype).float()
    elif "attn_mask" in options:
        npu_options["attn_mask"] = options["attn_mask"].npu()
    want = F.scaled_dot_product_attention(*on_cpu, **cpu_options)
    got = F.scaled_dot_product_attention(*on_npu, **npu_options)
    weights = torch.randn(want.shape).to(dtype)
    (want * weights.float()).sum().backward()
    (got * weights.npu()).sum().backward()
    assert got.dtype == dtype
    tolerance = {"rtol": 2e-5, "atol": 2e-6}
    if dtype != torch.float32:
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        if variant == "float mask":  # the CPU's rule: a float mask is not fused, each step rounds
            tolerance = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(got.cpu().float(), want, **tolerance)
    for npu_x, cpu_x in zip(on_npu, on_cpu, strict=True):
        assert npu_x.grad is not None
        torch.testing.assert_close(npu_x.grad.cpu().float(), cpu_x.grad, **tolerance)


def test_row_without_a_position_gives_zeros() -> None:
    query, key, value = (x.npu() for x in inputs(4, 4, torch.float32))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="npu")
    mask[3] = False
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert (out[:, :, 3] == 0).all()
    assert not out.isnan().any()


def test_dropout_is_the_same_in_the_gradient() -> None:
    """With v the identity, the result is the dropped probabilities, and dv their transpose."""
    query, key, _ = (x.npu() for x in inputs(1, 1, torch.float32))
    value = torch.eye(LENGTH, device="npu").expand(2, 1, LENGTH, LENGTH).clone().requires_grad_()
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert 0 < (out == 0).float().mean().item() < 1
    out.sum().backward()
    assert value.grad is not None
    want = out.detach().sum(2, keepdim=True).transpose(2, 3).expand(value.shape)
    torch.testing.assert_close(value.grad, want)


def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    return tensor


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_layouts(layout: str) -> None:
    tensors = inputs(4, 2, torch.float32)
    want = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    query, key, value = (to_layout(x, layout).npu() for x in tensors)
    scale = SIZE**-0.5
    got = torch_npu.npu_fusion_attention(query, key, value, 4, layout, scale=scale)
    torch.testing.assert_close(got[0].cpu(), to_layout(want, layout), rtol=2e-5, atol=2e-6)
    assert got[1].shape == (2, 4, LENGTH, 8)


def test_sequences_end_to_end() -> None:
    """``TND``: three sequences of their own lengths, causal, forward and backward."""
    ends = [2, 3, LENGTH]
    tensors = [torch.randn(LENGTH, heads, SIZE) for heads in (4, 2, 2)]
    on_cpu = [x.clone().requires_grad_() for x in tensors]
    on_npu = [x.npu().requires_grad_() for x in tensors]
    parts = [
        F.scaled_dot_product_attention(
            *(x[begin:end].transpose(0, 1)[None] for x in on_cpu), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    got = torch_npu.npu_fusion_attention(
        *on_npu,
        4,
        "TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1),
        scale=SIZE**-0.5,
        sparse_mode=3,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )
    want = torch.cat(parts)
    torch.testing.assert_close(got[0].cpu(), want, rtol=2e-5, atol=2e-6)
    assert got[1].shape == (LENGTH, 4, 8)
    weights = torch.randn(want.shape)
    (want * weights).sum().backward()
    (got[0] * weights.npu()).sum().backward()
    for npu_x, cpu_x in zip(on_npu, on_cpu, strict=True):
        assert npu_x.grad is not None
        torch.testing.assert_close(npu_x.grad.cpu(), cpu_x.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_sparse_modes(mode: int) -> None:
    """3 queries against 7 keys: causal from the top left (2), from the bottom right (3), a band."""
    query, key, value = inputs(2, 2, torch.float32)
    query = query[:, :, :3].contiguous()
    columns, rows = torch.arange(LENGTH), torch.arange(3).unsqueeze(1)
    bands = {
        0: columns < 5,
        1: columns < 5,
        2: columns <= rows,
        3: columns <= rows + 4,
        4: (columns <= rows + 4 + 1) & (columns >= rows + 4 - 2),
    }
    visible = bands[mode].expand(3, LENGTH)
    options: dict[str, Any] = {"atten_mask": ~visible.npu(), "sparse_mode": mode}
    if mode in (2, 3, 4):
        options["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    if mode == 4:
        options |= {"pre_tockens": 2, "next_tockens": 1}
    got = torch_npu.npu_fusion_attention(
        query.npu(), key.npu(), value.npu(), 2, "BNSD", scale=SIZE**-0.5, **options
    )
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    torch.testing.assert_close(got[0].cpu(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_mode": 6}, r"argument sparse_mode: got 6, want 0 to 4"),
        ({"prefix": [1, 2]}, r"argument prefix: got a value, want None"),
        ({"actual_seq_qlen": [3, 7]}, r"argument actual_seq_qlen: got a value, want None"),
    ],
)
def test_what_is_not_emulated_is_refused(change: dict[str, Any], message: str) -> None:
    query, key, value = (x.npu() for x in inputs(2, 2, torch.float32))
    options = {"input_layout": "BNSD"} | change
    with pytest.raises(AttentionError, match=message):
        torch_npu.npu_fusion_attention(query, key, value, 2, **options)
