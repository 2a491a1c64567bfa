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
from moe_graph.converters.kept_experts import kept_experts_decompositions
from moe_graph.converters.solve_triangular import solve_triangular
from moe_graph.converters.token_permute_950 import decompositions_on_950
from moe_graph.ops.npu_forms import FORMS

aten = torch.ops.aten
npu = torch.ops.npu

# Their converters refuse every call. Gated MLPs, state-space layers and softplus routers need them.
_FROM_PYTORCH = (aten.nan_to_num, aten.silu_backward, aten.softplus, aten.softplus_backward)


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


def _repeat_interleave_backward(
    grad: Tensor, x: Tensor, repeats: int, dim: int | None = None
) -> Tensor:
    """Sum the gradients of the copies that :func:`_repeat_interleave` makes of each slice."""
    if dim is None:
        return grad.reshape(-1, repeats).sum(1).reshape(x.shape)
    dim = dim % x.dim()
    copies = grad.reshape([*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]])
    return copies.sum(dim + 1)


def _isnan(x: Tensor) -> Tensor:
    """Find NaN, as ``nan_to_num`` does; it and the next two have converters that refuse to."""
    return x != x


def _isposinf(x: Tensor) -> Tensor:
    return x == math.inf


def _isneginf(x: Tensor) -> Tensor:
    return x == -math.inf


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Replace slices of `x`: a static cache of ``generate()`` writes keys and values so.

    Its converter refuses every call, and so does that of ``index_put``, PyTorch's decomposition.
    """
    if x.dim() == 0:
        return NotImplemented
    shape = [1] * x.dim()
    shape[dim] = -1
    return x.scatter(dim, index.view(shape).expand_as(source), source)


def _index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """Write, or add, `values` at an index: the gradient of ``x[index]`` adds so.

    Its converter refuses every call. The indexed dimensions are moved to the front and become one,
    along which a scatter writes.
    """
    used = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if not used or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return NotImplemented
    kept = [dim for dim in range(x.dim()) if dim not in used]
    order = [*used, *kept]
    tensors = list(torch.broadcast_tensors(*tensors))
    place = torch.zeros_like(tensors[0], dtype=torch.int64)
    for dim, index in zip(used, tensors, strict=True):
        place = place * x.shape[dim] + torch.where(index < 0, index + x.shape[dim], index)

    sizes = [x.shape[dim] for dim in kept]
    # Adjacent indices leave their dimensions where they were; others put them in front.
    adjacent = used == list(range(used[0], used[0] + len(used)))
    before = used[0] if adjacent else 0
    written = values.expand([*sizes[:before], *place.shape, *sizes[before:]])
    index_dims = list(range(before, before + place.dim()))
    written = written.permute(
        [*index_dims, *(dim for dim in range(written.dim()) if dim not in index_dims)]
    ).reshape([place.numel(), *sizes])

    flat = x.permute(order).reshape([-1, *sizes])
    rows = place.reshape([-1, *([1] * len(sizes))]).expand(written.shape)
    written = written.to(x.dtype)
    flat = flat.scatter_add(0, rows, written) if accumulate else flat.scatter(0, rows, written)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return flat.reshape([x.shape[dim] for dim in order]).permute(back)


def _scatter_bools(x: Tensor, dim: int, index: Tensor, source: Any) -> Any:
    """Write into a mask, as sparse attention does: ScatterElements has every dtype but bool."""
    if x.dtype is not torch.bool:
        return NotImplemented
    if isinstance(source, Tensor):
        source = source.to(torch.int8)
    return x.to(torch.int8).scatter(dim, index, source).to(torch.bool)


def _eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    """Identity matrix: chunked linear attention inverts with one. Its converter refuses calls."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = options.get("device")
    rows = torch.arange(n, device=device)
    columns = torch.arange(n if m is None else m, device=device)
    return (rows.unsqueeze(1) == columns).to(dtype)


def _all(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Whether all are true, as masks of sparse attention ask. The converters refuse calls."""
    missing = (x == 0).any() if dim is None else (x == 0).any(dim, keepdim)
    return missing.logical_not()


def _polar(absolute: Tensor, angle: Tensor) -> Tensor:
    """Complex numbers of polar coordinates: complex rotary embeddings start so; no converter."""
    parts = torch.stack([absolute * angle.cos(), absolute * angle.sin()], -1)
    return torch.view_as_complex(parts)


def _conj(x: Tensor) -> Tensor:
    """Conjugate, which the gradient of a complex product takes lazily; no converter."""
    if not x.is_complex():
        return x
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.view_as_complex(torch.stack([real, -imaginary], -1))


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
    not 1, as in interleaved rotary embeddings; and it takes ``x[-63:]`` of a shorter tensor for a
    slice that begins before it. It takes every other slice.
    """
    dim = dim % len(input_sizes)
    if start < 0 and step == 1 and end >= sys.maxsize:
        first = input_sizes[dim] - grad.shape[dim]
        return aten.slice_backward.default(grad, input_sizes, dim, first, end, step)
    if step == 1 or start < 0 or end < sys.maxsize:
        return NotImplemented
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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return op -> decomposition for TorchAir's ``custom_decompositions``."""
    return _constant_decompositions() | kept_experts_decompositions()


@functools.cache
def _constant_decompositions() -> dict[Any, Callable[..., Any]]:
    return {
        **get_decompositions(_FROM_PYTORCH),
        npu._npu_dtype_cast_backward.default: _cast_backward,
        aten.softmax.int: _softmax,
        aten._safe_softmax.default: _safe_softmax,
        aten.repeat_interleave.self_int: _repeat_interleave,
        npu.repeat_interleave_backward_int.default: _repeat_interleave_backward,
        aten.isnan.default: _isnan,
        aten.isposinf.default: _isposinf,
        aten.isneginf.default: _isneginf,
        aten.index_copy.default: _index_copy,
        aten.index_put.default: _index_put,
        aten.scatter.value: _scatter_bools,
        aten.scatter.src: _scatter_bools,
        aten.all.default: _all,
        aten.all.dim: _all,
        aten.eye.default: _eye,
        aten.eye.m: _eye,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten.polar.default: _polar,
        aten._conj.default: _conj,
        aten.matmul_backward.default: _matmul_backward,
        aten.slice_backward.default: _slice_backward,
        aten.select_backward.default: _select_backward,
        **ATTENTION_DECOMPOSITIONS,
        **decompositions_on_950(),
        **{getattr(npu, name).default: form for name, form in FORMS.items()},
    }
