"""``scaled_dot_product_attention`` compiled for NPU tensors, against eager PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moe_graph

HEADS, WIDTH = 4, 16


def visible(batch: int, length: int) -> Tensor:
    """A causal mask with padding at the start of the last sequence: every query sees a key."""
    mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(batch, 1, 1, 1)
    mask[-1, 0, 2:, 0] = False
    return mask


def no_mask(batch: int, length: int) -> None:
    return None


def float_mask(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 1, length, length)


# name -> options of the call, maker of the mask, heads of keys and values, width of values
CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensor | None], int, int]] = {
    "no mask": ({}, no_mask, HEADS, WIDTH),
    "causal": ({"is_causal": True}, no_mask, HEADS, WIDTH),
    "bool mask": ({}, visible, HEADS, WIDTH),
    "float mask": ({}, float_mask, HEADS, WIDTH),
    "scale": ({"is_causal": True, "scale": 0.5}, no_mask, HEADS, WIDTH),
    "shared heads": ({"is_causal": True, "enable_gqa": True}, no_mask, 2, WIDTH),
    "shared heads, bool mask": ({"enable_gqa": True}, visible, 1, WIDTH),
    "narrow values": ({"is_causal": True}, no_mask, HEADS, 8),
    "narrow values, bool mask": ({}, visible, HEADS, 8),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def result_and_gradients(function: Any, *inputs: Tensor | None) -> list[Tensor]:
    """Return the result and the gradients of query, key and value, on the CPU in fp32."""
    leaves = [each.detach().requires_grad_() for each in inputs[:3] if each is not None]
    result = function(*leaves, inputs[3])
    result.float().square().sum().backward()
    return [each.detach().cpu().float() for each in (result, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case: str, dtype: torch.dtype, dynamic: bool) -> None:
    torch._dynamo.reset()
    options, make_mask, key_heads, value_width = CASES[case]

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask, **options)

    backend = moe_graph.npu_backend()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    # Dynamo takes equal sizes for one symbol, so no batch is as large as a number of heads.
    for batch, length in ((3, 9), (5, 6)) if dynamic else ((3, 9),):
        shapes = ((HEADS, WIDTH), (key_heads, WIDTH), (key_heads, value_width))
        inputs = [torch.randn(batch, heads, length, wide).to(dtype) for heads, wide in shapes]
        mask = make_mask(batch, length)
        # The oracle has the same numbers in fp32, so it is not a rounding that is compared.
        wanted = result_and_gradients(function, *(each.float() for each in inputs), mask)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        got = result_and_gradients(
            compiled, *(each.npu() for each in inputs), None if mask is None else mask.npu()
        )
        for one, other in zip(got, wanted, strict=True):
            limit = TOLERANCE[dtype] * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=0, atol=limit)
    assert backend.report.graphs == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_without_keys_give_what_eager_gives(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, HEADS, 5, WIDTH).to(dtype).npu()
    mask = visible(1, 5).npu()
    mask[0, 0, 3] = False
    compiled = torch.compile(
        functional.scaled_dot_product_attention, backend=moe_graph.npu_backend(), fullgraph=True
    )
    got = compiled(q, k, v, mask).cpu()
    seen = [0, 1, 2, 4]
    want = functional.scaled_dot_product_attention(
        *(each.cpu().float() for each in (q, k, v)), mask.cpu()
    )
    assert got.isfinite().all()
    torch.testing.assert_close(
        got[:, :, seen].float(), want[:, :, seen], rtol=0, atol=TOLERANCE[dtype] * 4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dropout_is_refused_while_compiling(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    q = torch.randn(1, HEADS, 5, WIDTH).to(dtype).npu()
    compiled = torch.compile(
        lambda q: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.25),
        backend=moe_graph.npu_backend(),
    )
    with pytest.raises(
        Exception, match=r"npu_fusion_attention_v3: keep_prob: got 0\.75, want 1\.0, no dropout"
    ):
        compiled(q)
