"""Decompositions that whole models need and TorchAir lacks, with the reason for each.

TorchAir's own table is nearly empty, so a graph reaches its converters as raw ATen. The entries
here go in through TorchAir's ``custom_decompositions`` argument. PyTorch's own decomposition is
taken wherever there is one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from moe_graph.converters.attention import ATTENTION_DECOMPOSITIONS
from moe_graph.converters.token_permute_950 import decompositions_on_950
from moe_graph.ops.npu_forms import FORMS

aten = torch.ops.aten
npu = torch.ops.npu

# The converter refuses every call; every gated MLP needs it to train.
_FROM_PYTORCH = (aten.silu_backward,)


def _cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the cast that autocast-like code becomes on NPU tensors.

    torch_npu turns ``x.to(dtype)`` into an op of its own, whose gradient has no converter.
    """
    return grad.to(dtype)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax as attention in matrix products has it: on NPU tensors it reaches the graph whole."""
    return aten._softmax.default(x if dtype is None else x.to(dtype), dim, False)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax that gives zeros where all of a row is -inf: attention with a float mask uses it.

    It has no converter, and PyTorch's decomposition needs ``all`` over a dimension, which has none.
    """
    row_max, _ = x.max(dim, keepdim=True)
    return _softmax(x, dim, dtype).masked_fill(row_max == -math.inf, 0.0)


def _repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Repeat each slice: ``batched_mm`` experts, into which ``generate()`` switches, do so.

    PyTorch decomposes it before the graph is made; on NPU tensors torch_npu keeps it whole, and its
    converter refuses every call.
    """
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim = dim % x.dim()
    shape = [*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]]
    return x.unsqueeze(dim + 1).expand(shape).clone().flatten(dim, dim + 1)


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Replace slices of `x`: a static cache of ``generate()`` writes keys and values so.

    Its converter refuses every call, and so does that of ``index_put``, PyTorch's decomposition.
    """
    if x.dim() == 0:
        return NotImplemented
    shape = [1] * x.dim()
    shape[dim] = -1
    return x.scatter(dim, index.view(shape).expand_as(source), source)


def _matmul_backward(
    grad: Tensor, left: Tensor, right: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``left @ right`` for every pair of ranks.

    On NPU tensors ``F.linear`` is a matmul of its own with this gradient. TorchAir's converter
    takes operands of equal rank only and gives a weight the shape of its batch.
    """
    a = left.unsqueeze(0) if left.dim() == 1 else left
    b = right.unsqueeze(1) if right.dim() == 1 else right
    if left.dim() == 1:
        grad = grad.unsqueeze(-1 if right.dim() == 1 else -2)
    if right.dim() == 1:
        grad = grad.unsqueeze(-1)
    grad_left = torch.matmul(grad, b.mT).sum_to_size(a.shape) if mask[0] else None
    grad_right = None
    if mask[1] and b.dim() == 2:  # one product over all rows, no gradient per batch
        grad_right = torch.matmul(a.reshape(-1, a.shape[-1]).mT, grad.reshape(-1, grad.shape[-1]))
    elif mask[1]:
        grad_right = torch.matmul(a.mT, grad).sum_to_size(b.shape)
    return (
        None if grad_left is None else grad_left.reshape(left.shape),
        None if grad_right is None else grad_right.reshape(right.shape),
    )


def _slice_backward(
    grad: Tensor, input_sizes: list[int], dim: int, start: int, end: int, step: int
) -> Any:
    """Gradient of ``x[start::step]``: put zeros between the rows of `grad`.

    TorchAir's converter overflows int32 on the open end when the length is symbolic and the step is
    not 1, as in interleaved rotary embeddings. It takes every other slice.
    """
    if step == 1 or start < 0 or end < sys.maxsize:
        return NotImplemented
    dim = dim % len(input_sizes)
    spread = grad.unsqueeze(dim + 1)
    gaps = spread.new_zeros([*spread.shape[: dim + 1], step - 1, *spread.shape[dim + 2 :]])
    rows = torch.cat([spread, gaps], dim + 1).flatten(dim, dim + 1)
    if start > 0:
        before = rows.new_zeros([*rows.shape[:dim], start, *rows.shape[dim + 1 :]])
        rows = torch.cat([before, rows], dim)
    return rows.narrow(dim, 0, input_sizes[dim])


def _select_backward(grad: Tensor, input_sizes: list[int], dim: int, index: int) -> Tensor:
    """Gradient of ``x.select(dim, index)``: a slice of one row.

    TorchAir's converter scatters into memory that it never clears.
    """
    rows = grad.unsqueeze(dim % len(input_sizes))
    start = index + input_sizes[dim] if index < 0 else index
    return aten.slice_backward.default(rows, input_sizes, dim, start, start + 1, 1)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return op -> decomposition for TorchAir's ``custom_decompositions``."""
    return {
        **get_decompositions(_FROM_PYTORCH),
        npu._npu_dtype_cast_backward.default: _cast_backward,
        aten.softmax.int: _softmax,
        aten._safe_softmax.default: _safe_softmax,
        aten.repeat_interleave.self_int: _repeat_interleave,
        aten.index_copy.default: _index_copy,
        aten.matmul_backward.default: _matmul_backward,
        aten.slice_backward.default: _slice_backward,
        aten.select_backward.default: _select_backward,
        **ATTENTION_DECOMPOSITIONS,
        **decompositions_on_950(),
        **{getattr(npu, name).default: form for name, form in FORMS.items()},
    }
