"""Traces ``F.scaled_dot_product_attention`` of NPU tensors without fixing their sizes.

torch_npu's kernel reads sizes as plain integers, so a trace with symbolic sizes becomes a trace for
one length, and every new length compiles again. :func:`install` gives the dispatcher's Python side
the same translation in symbolic arithmetic. It is used while tracing, where a size is symbolic;
everything else still goes to torch_npu.

    causal     ->  npu_fusion_attention_v3(..., atten_mask=triangle, next_tockens=0, sparse_mode=2)
    bool mask  ->  npu_fusion_attention_v3(..., atten_mask=~mask, inner_precise=2)
    otherwise  ->  the definition in matrix products, as torch_npu has it for float masks
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
npu = torch.ops.npu

_TRIANGLE = 2048  # the fused op wants its causal mask in this size, whatever the lengths
_UNBOUNDED = 2147483647
_CAUSAL = 2
_INVALID_LINE_CORRECTION = 2  # inner_precise: rows that are masked throughout give zeros
_KEYS = (torch._C.DispatchKey.AutogradPrivateUse1, torch._C.DispatchKey.PrivateUse1)


@functools.cache
def install() -> None:
    """Register the translation; later calls change nothing."""
    for key in _KEYS:
        aten.scaled_dot_product_attention.default.py_impl(key)(functools.partial(_translate, key))


def _translate(
    key: Any, query: Tensor, keys: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Translate a call with symbolic sizes; hand any other to torch_npu."""
    tensors = [query, keys, value, *(arg for arg in args if isinstance(arg, Tensor))]
    if all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        operator = aten.scaled_dot_product_attention.default
        return operator._op_dk(key, query, keys, value, *args, **kwargs)
    return _attention(query, keys, value, *args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if scale is None:  # an attribute of the fused op, so a plain number
        scale = 1.0 / math.sqrt(int(query.shape[-1]))
    masked_by_bool = attn_mask is None or attn_mask.dtype == torch.bool
    if query.dim() != 4 or not masked_by_bool or dropout_p > 0.0:
        out, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    options: dict[str, Any] = {"scale": scale}
    if is_causal:
        triangle = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=query.device)
        options |= {
            "atten_mask": triangle.triu(1),
            "next_tockens": 0,
            "sparse_mode": _CAUSAL,
        }
    elif attn_mask is not None:
        options |= {
            "atten_mask": attn_mask.logical_not(),
            "inner_precise": _INVALID_LINE_CORRECTION,
        }
    heads = int(query.shape[1])  # an attribute of the fused op
    return npu.npu_fusion_attention_v3(query, key, value, heads, "BNSD", **options)[0]
