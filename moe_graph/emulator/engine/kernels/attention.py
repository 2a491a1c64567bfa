"""FlashAttentionScore and its gradient, computed in fp32 by the definition.

The scores of a query i and a key j are kept when the pair is inside the band of ``pre_tockens`` and
``next_tockens`` and the mask does not forbid it. ``softmax_max`` and ``softmax_sum`` hold the row
maximum and the row sum of the exponentials, repeated 8 times in the last dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._sharing import matmul
from moe_graph.emulator.engine.registry import Ints, Tensor, ge_op

_REPEATS = 8
#: sparse_mode: 0 band from pre/next tockens with an optional mask, 1 mask only, 2 causal from the
#: upper left corner, 3 causal from the lower right corner, 4 band from the lower right corner.
_DEFAULT, _ALL, _LEFT_UP, _RIGHT_DOWN, _BAND = range(5)
_IGNORED = ("inner_precise", "tnd_softmax_in")
_UNBOUNDED = 2147483647


@dataclass(frozen=True)
class _Layout:
    """How [batch, heads, sequence, dim] is stored."""

    name: str
    heads: int

    def split(self, x: Tensor, width: int | None = None) -> Tensor:
        """Return x as fp32 [B, N, S, D]; `width` is D where the layout does not tell."""
        if self.name == "BNSD":
            result = x
        elif self.name == "BSND":
            result = x.transpose(1, 2)
        elif self.name in ("BSH", "SBH"):
            batch_first = x if self.name == "BSH" else x.transpose(0, 1)
            size = width or x.shape[-1] // self.heads
            result = batch_first.reshape(*batch_first.shape[:2], -1, size).transpose(1, 2)
        else:
            raise KernelError("input_layout", self.name, "BNSD, BSND, BSH or SBH")
        return result.float()

    def merge(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Store [B, N, S, D] in this layout."""
        x = x.to(dtype)
        if self.name == "BNSD":
            return x
        x = x.transpose(1, 2)
        if self.name == "BSND":
            return x
        x = x.flatten(2)
        return x if self.name == "BSH" else x.transpose(0, 1)


@dataclass(frozen=True)
class _Scores:
    """Inputs in [B, N, S, D] and the masked scores [B, N, Sq, Skv], all fp32."""

    layout: _Layout
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    groups: int


@ge_op("FlashAttentionScore", ignored=_IGNORED, same_dtype=("query", "key", "value"))
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real_shift: Tensor | None,
    drop_mask: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    prefix: Tensor | None,
    actual_seq_qlen: Ints | None,
    actual_seq_kvlen: Ints | None,
    q_start_idx: Tensor | None,
    kv_start_idx: Tensor | None,
    *,
    head_num: int,
    input_layout: str,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return softmax_max and softmax_sum [B, N, S, 8] fp32, an empty softmax_out, attention_out.

    A row in which every key is masked gives 0.
    """
    _refuse(drop_mask, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, keep_prob)
    band = (pre_tockens, next_tockens, sparse_mode)
    case = _scores(
        query, key, value, real_shift, atten_mask, head_num, input_layout, scale_value, band
    )
    if case.scores.shape[-1] == 0:
        raise KernelError("key", "a sequence of length 0", "at least one key")
    peak = case.scores.amax(-1, keepdim=True)
    weights = torch.exp(case.scores - _finite(peak))
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total, torch.zeros_like(weights))
    out = matmul(weights, _repeat(case.value, case.groups))
    return (
        peak.expand(*peak.shape[:-1], _REPEATS).contiguous(),
        total.expand(*total.shape[:-1], _REPEATS).contiguous(),
        query.new_empty(0),
        case.layout.merge(out, query.dtype),
    )


@ge_op("FlashAttentionScoreGrad", ignored=_IGNORED, same_dtype=("query", "key", "value", "dy"))
def flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    pse_shift: Tensor | None,
    drop_mask: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    softmax_in: Tensor | None,
    attention_in: Tensor | None,
    prefix: Tensor | None,
    actual_seq_qlen: Ints | None,
    actual_seq_kvlen: Ints | None,
    q_start_idx: Tensor | None,
    kv_start_idx: Tensor | None,
    *,
    head_num: int,
    input_layout: str,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 65536,
    next_tockens: int = 65536,
    sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in their layouts, and dpse (empty without pse_shift).

    The softmax is rebuilt from the scores with softmax_max and softmax_sum, as on the device.
    """
    _refuse(drop_mask, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, keep_prob)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise KernelError("softmax_max, softmax_sum, attention_in", "nothing", "three tensors")
    band = (pre_tockens, next_tockens, sparse_mode)
    case = _scores(
        query, key, value, pse_shift, atten_mask, head_num, input_layout, scale_value, band
    )
    total = softmax_sum[..., :1]
    weights = torch.exp(case.scores - _finite(softmax_max[..., :1]))
    weights = torch.where(total > 0, weights / total, torch.zeros_like(weights))
    width = case.value.shape[-1]
    grad = case.layout.split(dy, width)
    rows = (grad * case.layout.split(attention_in, width)).sum(-1, keepdim=True)
    dscores = weights * (matmul(grad, _repeat(case.value, case.groups).mT) - rows)
    dq = matmul(dscores, _repeat(case.key, case.groups)) * scale_value
    dk = _sum_groups(matmul(dscores.mT, case.query), case.groups) * scale_value
    dv = _sum_groups(matmul(weights.mT, grad), case.groups)
    dpse = (
        query.new_empty(0)
        if pse_shift is None
        else dscores.sum_to_size(pse_shift.shape).to(query.dtype)
    )
    merge = case.layout.merge
    return merge(dq, query.dtype), merge(dk, key.dtype), merge(dv, value.dtype), dpse


def _refuse(
    drop_mask: Tensor | None,
    padding_mask: Tensor | None,
    prefix: Tensor | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    keep_prob: float,
) -> None:
    """Refuse what is not emulated: dropout, prefix masks and packed sequences."""
    if not math.isclose(keep_prob, 1.0):
        raise KernelError("keep_prob", keep_prob, "1.0: attention dropout is not emulated")
    given = {
        "drop_mask": drop_mask,
        "padding_mask": padding_mask,
        "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen,
    }
    for name, value in given.items():
        if value is not None:
            raise KernelError(name, "a value", "nothing: it is not emulated")


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shift: Tensor | None,
    mask: Tensor | None,
    heads: int,
    layout_name: str,
    scale: float,
    band: tuple[int, int, int],
) -> _Scores:
    layout = _Layout(layout_name, heads)
    q = layout.split(query)
    k = layout.split(key, q.shape[-1])
    kv_heads = k.shape[1]
    if q.shape[1] != heads:
        raise KernelError("head_num", heads, f"{q.shape[1]}, the heads of query")
    if kv_heads == 0 or heads % kv_heads:
        raise KernelError("key", f"{kv_heads} heads", f"a divisor of head_num {heads}")
    if layout_name in ("BSH", "SBH"):
        v = layout.split(value, value.shape[-1] // kv_heads)
    else:
        v = layout.split(value)
    if v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0]:
        shapes = f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        raise KernelError("query, key, value", shapes, "matching batch, heads and sequence")
    scores = matmul(q, _repeat(k, heads // kv_heads).mT) * scale
    if shift is not None:
        scores = scores + shift.float()
    dropped = _dropped(q.shape[2], k.shape[2], mask, *band)
    if dropped is not None:
        scores = scores.masked_fill(dropped, float("-inf"))
    return _Scores(layout, q, k, v, scores, heads // kv_heads)


def _dropped(
    rows: int, columns: int, mask: Tensor | None, before: int, after: int, mode: int
) -> Tensor | None:
    """Return True where a score is left out, broadcastable to [B, N, Sq, Skv]; None for nowhere."""
    if mode not in (_DEFAULT, _ALL, _LEFT_UP, _RIGHT_DOWN, _BAND):
        raise KernelError("sparse_mode", mode, "0 to 4")
    if mode in (_LEFT_UP, _RIGHT_DOWN, _BAND):
        # the mask that comes with these modes is a fixed triangle of 2048 x 2048: a template only
        if mask is None:
            raise KernelError("atten_mask", "nothing", f"a mask with sparse_mode {mode}")
        mask = None
    if mode == _LEFT_UP:
        return _outside(rows, columns, _UNBOUNDED, 0)
    if mode == _RIGHT_DOWN:
        return _outside(rows, columns, _UNBOUNDED, columns - rows)
    if mode == _BAND:
        return _outside(rows, columns, before - (columns - rows), after + columns - rows)
    dropped = None if mask is None else mask.bool()
    if dropped is not None and mode == _DEFAULT:
        band = _outside(rows, columns, before, after)
        # without a mask the band is not looked at
        dropped = dropped if band is None else dropped | band
    return dropped


def _outside(rows: int, columns: int, before: int, after: int) -> Tensor | None:
    """Return True where j < i - before or j > i + after."""
    if before >= rows and after >= columns:
        return None
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    return (distance < -before) | (distance > after)


def _repeat(x: Tensor, groups: int) -> Tensor:
    """Repeat every key/value head for the query heads that share it."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def _finite(peak: Tensor) -> Tensor:
    """Return row maxima with 0 for a row in which everything is masked."""
    return torch.where(torch.isinf(peak), torch.zeros_like(peak), peak)
