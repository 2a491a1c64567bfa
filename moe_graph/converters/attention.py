"""Scaled dot product attention on NPU tensors, forward and backward.

torch_npu turns ``F.scaled_dot_product_attention`` into ``npu_fusion_attention_v3`` and its
gradient, which TorchAir cannot convert. What they become depends on the dtype, since the graph
engine's FlashAttentionScore takes only 16-bit floats.

16-bit, one node each way (``attention_converters.py``)::

    npu_fusion_attention_v3       ->  FlashAttentionScore
    npu_fusion_attention_grad_v3  ->  FlashAttentionScoreGrad

fp32, the definition in matrix products (here)::

    npu_fusion_attention_v3       ->  matmul, mul, masked_fill, max, sub, exp, sum, div, matmul
    npu_fusion_attention_grad_v3  ->  the same again, then four matmul

Neither is lowered with dropout (``keep_prob`` below 1), a layout other than BNSD, a window of
tokens, ``pse``, ``prefix``, ``sink``, or a sparse mode other than 0 (the mask as given), 2 (causal
from the top left) and 3 (causal from the bottom right): :func:`refuse_unsupported` names the one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

npu = torch.ops.npu

LANES = 8
"""The fused op returns the maximum and the sum of each row of scores in this many equal lanes."""

_UNBOUNDED = 2147483647
_CAUSAL_TOP_LEFT, _CAUSAL_BOTTOM_RIGHT = 2, 3
# Rows with every key masked stay finite, as in the fused kernel.
_MASKED_SCORE = torch.finfo(torch.float32).min


def refuse_unsupported(op: str, arguments: dict[str, Any]) -> None:
    """Raise for a call that has no lowering.

    Args:
        op: name of the torch op.
        arguments: all arguments of the call, defaults filled in.

    Raises:
        NotImplementedError: naming op, argument, got and want.
    """
    sparse_mode = arguments["sparse_mode"]
    causal = sparse_mode in (_CAUSAL_TOP_LEFT, _CAUSAL_BOTTOM_RIGHT)
    wanted: dict[str, tuple[bool, str]] = {
        "input_layout": (arguments["input_layout"] == "BNSD", "'BNSD'"),
        "keep_prob": (arguments["keep_prob"] == 1.0, "1.0, no dropout"),
        "sparse_mode": (sparse_mode == 0 or causal, "0, 2 or 3"),
        "pre_tockens": (arguments["pre_tockens"] >= _UNBOUNDED, f"{_UNBOUNDED}, no window"),
        "next_tockens": (
            causal or arguments["next_tockens"] >= _UNBOUNDED,
            f"{_UNBOUNDED}, no window",
        ),
    }
    for name in ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink"):
        wanted[name] = (arguments[name] is None, "None")
    for name, (supported, want) in wanted.items():
        if not supported:
            got = arguments[name]
            shown = "a tensor" if isinstance(got, Tensor) else repr(got)
            raise NotImplementedError(
                f"{op}: {name}: got {shown}, want {want}; graphs have no lowering for it, "
                "attn_implementation='eager' has one"
            )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> Any:
    """Decompose ``npu_fusion_attention_v3`` for fp32; leave 16-bit calls to the converter.

    Returns:
        attention_out [B, N, Sq, Dv], softmax_max and softmax_sum [B, N, Sq, 8] fp32, softmax_out
        [0], seed [1] and offset [1] int64; NotImplemented for 16-bit.
    """
    if query.dtype != torch.float32:
        return NotImplemented
    refuse_unsupported("npu_fusion_attention_v3", locals())
    scores = _scores(query, key, atten_mask, scale, sparse_mode)
    row_max, _ = scores.max(-1, keepdim=True)
    exponentials = (scores - row_max).exp()
    row_sum = exponentials.sum(-1, keepdim=True)
    out = torch.matmul(exponentials / row_sum, _per_query_head(value, query))
    lanes = (*row_max.shape[:-1], LANES)
    unused = [query.new_empty(0), _no_dropout_state(query), _no_dropout_state(query)]
    return (out, row_max.expand(lanes).clone(), row_sum.expand(lanes).clone(), *unused)


def attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    inner_precise: int = 0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    prefix: list[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> Any:
    """Decompose ``npu_fusion_attention_grad_v3`` for fp32; leave 16-bit calls to the converter.

    Returns:
        Gradients of query, key and value, each shaped like its input, then two unused [0] tensors
        for ``pse`` and ``sink``; NotImplemented for 16-bit.
    """
    if query.dtype != torch.float32:
        return NotImplemented
    refuse_unsupported("npu_fusion_attention_grad_v3", locals())
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    scores = _scores(query, key, atten_mask, scale_value, sparse_mode)
    weights = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    values = _per_query_head(value, query)
    grad_weights = torch.matmul(dy, values.transpose(-1, -2))
    row_dot = (dy * attention_in).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_dot) * scale_value
    grad_query = torch.matmul(grad_scores, _per_query_head(key, query))
    grad_key = torch.matmul(grad_scores.transpose(-1, -2), query)
    grad_value = torch.matmul(weights.transpose(-1, -2), dy)
    return (
        grad_query,
        _per_key_head(grad_key, key),
        _per_key_head(grad_value, value),
        query.new_empty(0),
        query.new_empty(0),
    )


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, sparse_mode: int
) -> Tensor:
    """Return masked scores [B, N, Sq, Sk]; a true mask entry drops its key."""
    scores = torch.matmul(query, _per_query_head(key, query).transpose(-1, -2)) * scale
    if sparse_mode in (_CAUSAL_TOP_LEFT, _CAUSAL_BOTTOM_RIGHT):
        mask = _causal_mask(query, key, from_bottom=sparse_mode == _CAUSAL_BOTTOM_RIGHT)
    if mask is None:
        return scores
    return scores.masked_fill(mask.to(torch.bool), _MASKED_SCORE)


def _causal_mask(query: Tensor, key: Tensor, *, from_bottom: bool) -> Tensor:
    """Return [Sq, Sk], true where a key comes after its query.

    The op's own mask argument is a fixed 2,048 x 2,048 triangle in these modes, whatever Sq and Sk.
    """
    queries, keys = query.shape[2], key.shape[2]
    first = keys - queries if from_bottom else 0
    rows = torch.arange(queries, device=query.device) + first
    return torch.arange(keys, device=query.device).unsqueeze(0) > rows.unsqueeze(1)


def _per_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat each head of `tensor` [B, Nk, S, D] for the query heads that share it."""
    batch, heads, length, width = tensor.shape
    shared = query.shape[1] // heads
    if shared == 1:
        return tensor
    repeated = tensor.unsqueeze(2).expand(batch, heads, shared, length, width)
    return repeated.reshape(batch, heads * shared, length, width)


def _per_key_head(grad: Tensor, tensor: Tensor) -> Tensor:
    """Add up the gradients [B, N, S, D] of the query heads that share a head of `tensor`."""
    batch, heads, length, width = tensor.shape
    shared = grad.shape[1] // heads
    if shared == 1:
        return grad
    return grad.reshape(batch, heads, shared, length, width).sum(2)


def _no_dropout_state(query: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=query.device)


ATTENTION_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    npu.npu_fusion_attention_v3.default: attention,
    npu.npu_fusion_attention_grad_v3.default: attention_grad,
}
