"""Lowers the grouped experts of a layer that was kept, so that it does not stop the whole model.

What the passes rewrite has none of these ops left. A layer that they keep, with its reason in the
report, still has ``histc`` and the grouped products of PyTorch or transformers, none of which
TorchAir can convert::

    histc(ids, bins=E, min=0, max=E-1)    becomes   scatter_add of ones
    grouped_mm(rows, weights, ends)       becomes   GroupedMatmul
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def kept_experts_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return op -> decomposition; those of transformers once that is imported."""
    found: dict[Any, Callable[..., Any]] = {
        aten.histc.default: _histc,
        aten._grouped_mm.default: _grouped_mm,
    }
    fallback = _op_of_transformers("grouped_mm_fallback")
    if fallback is not None:
        found[fallback] = _grouped_mm
    backward = _op_of_transformers("grouped_mm_fallback_backward")
    if backward is not None:
        found[backward] = _grouped_mm_backward
    return found


def _op_of_transformers(name: str) -> Any | None:
    packet = getattr(torch.ops.transformers, name, None)
    return None if packet is None else packet.default


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count the elements in each of `bins` equal parts of [min, max]; others are dropped."""
    if min >= max:  # then the data decide the range
        return NotImplemented
    values = x.reshape(-1)
    inside = (values >= min) & (values <= max)
    place = ((values.float() - min) * (bins / (max - min))).to(torch.int64)
    place = torch.where(inside, place.clamp(0, bins - 1), bins)  # the last part includes max
    counts = x.new_zeros(bins + 1).scatter_add(0, place, torch.ones_like(values))
    return counts[:bins]


def _grouped_mm(
    rows: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows of each group times its matrix, or, of two matrices, the product of each group."""
    same = out_dtype is None or out_dtype == rows.dtype
    if offs is None or bias is not None or not same or rows.dim() != 2:
        return NotImplemented
    ends = offs.to(torch.int64)
    if weights.dim() == 3:
        return _product(rows, weights, ends)
    return _product(rows.mT, weights, ends, inner=True)


def _grouped_mm_backward(
    rows: Tensor, weights: Tensor, offs: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    ends = offs.to(torch.int64)
    return _product(grad, weights.mT, ends), _product(rows, grad, ends, inner=True)


def _product(left: Tensor, right: Tensor, ends: Tensor, inner: bool = False) -> Tensor:
    """GroupedMatmul with groups of rows; `inner`: ``left.T @ right`` of each group."""
    return torch.ops.moe_graph.grouped_matmul_single(
        _dense(left), _dense(right), None, ends, False, inner, 2 if inner else 0, 0
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
