"""Reductions and scans. Sums of half-precision floats are taken in fp32.

The bits of a result do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_graph.emulator.engine.dtypes import HALF
from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32, widen
from moe_graph.emulator.engine.registry import Int, Ints, Tensor, ge_op

#: PyTorch sums more elements than this into a single number in one part per thread.
_ONE_THREAD = 32768
_ROW = 4096


def _sum(x: Tensor, axes: list[int], keep_dims: bool) -> Tensor:
    """Sum in the dtype of x; a single number out of many elements is summed row by row."""
    count = x.numel()
    whole = len({axis % x.dim() for axis in axes}) == x.dim() if x.dim() else False
    if not whole or count <= _ONE_THREAD or not x.is_floating_point():
        return torch.sum(x, axes, keepdim=keep_dims, dtype=x.dtype)
    flat = x.reshape(-1)
    whole_rows = count // _ROW * _ROW
    wide = torch.float32 if x.dtype in HALF else x.dtype
    parts = flat[:whole_rows].view(-1, _ROW).sum(1, dtype=wide)
    total = _sum(parts, [0], keep_dims=False) + flat[whole_rows:].sum(dtype=wide)
    return total.to(x.dtype).reshape([1] * x.dim() if keep_dims else [])


@ge_op("ReduceSum", ignored=("noop_with_empty_axes",))
def reduce_sum(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    """Sum over `axes` in the dtype of x. No axes: x itself."""
    return _sum(x, axes, keep_dims) if axes else x.clone()


@ge_op("ReduceSumD")
def reduce_sum_d(x: Tensor, *, axes: list[int], keep_dims: bool = False) -> Tensor:
    return reduce_sum(x, axes, keep_dims=keep_dims)


@ge_op("ReduceMean")
def reduce_mean(
    x: Tensor, axes: Ints, *, keep_dims: bool = False, noop_with_empty_axes: bool = True
) -> Tensor:
    if not axes and (noop_with_empty_axes or x.dim() == 0):
        return x.clone()
    axes = axes or list(range(x.dim()))
    if x.numel() > _ONE_THREAD and len(axes) == x.dim():
        return (_sum(widen(x), axes, keep_dims) / x.numel()).to(x.dtype)
    return torch.mean(x, axes, keepdim=keep_dims)


@ge_op("ReduceMeanWithCast")
def reduce_mean_with_cast(
    x: Tensor,
    axes: Ints,
    *,
    keep_dims: bool = False,
    noop_with_empty_axes: bool = True,
    dtype: torch.dtype,
) -> Tensor:
    """Mean of x in `dtype`."""
    return reduce_mean(
        x.to(dtype), axes, keep_dims=keep_dims, noop_with_empty_axes=noop_with_empty_axes
    )


@ge_op("ReduceMax", ignored=("noop_with_empty_axes",))
def reduce_max(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    return torch.amax(x, axes, keepdim=keep_dims) if axes else x.clone()


@ge_op("ReduceMin", ignored=("noop_with_empty_axes",))
def reduce_min(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    return torch.amin(x, axes, keepdim=keep_dims) if axes else x.clone()


@ge_op("ReduceAll")
def reduce_all(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    return torch.all(x, axes, keepdim=keep_dims) if axes else x.clone()


@ge_op("ReduceAny")
def reduce_any(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    return torch.any(x, axes, keepdim=keep_dims) if axes else x.clone()


@ge_op("ReduceProd")
@in_fp32
def reduce_prod(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    for axis in sorted((axis % max(x.dim(), 1) for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep_dims, dtype=x.dtype)
    return x.clone() if not axes else x


@ge_op("ReduceProdD")
def reduce_prod_d(x: Tensor, *, axes: list[int], keep_dims: bool = False) -> Tensor:
    return reduce_prod(x, axes, keep_dims=keep_dims)


@ge_op("ReduceLogSumExp")
@in_fp32
def reduce_log_sum_exp(x: Tensor, axes: Ints, *, keep_dims: bool = False) -> Tensor:
    return torch.logsumexp(x, axes, keepdim=keep_dims) if axes else x.clone()


@ge_op("ReduceStdWithMean")
@in_fp32
def reduce_std_with_mean(
    x: Tensor,
    mean: Tensor,
    *,
    dim: list[int],
    unbiased: bool = True,
    keepdim: bool = False,
    invert: bool = False,
    epsilon: float = 0.001,
    correction: int = 1,
) -> Tensor:
    """Standard deviation of x around a given mean; `invert` gives 1 / sqrt(var + epsilon)."""
    dims = dim or list(range(x.dim()))
    count = 1
    for each in dims:
        count *= x.shape[each]
    squares = torch.sum((x - mean).square(), dims, keepdim=keepdim)
    variance = squares / (count - (correction if unbiased else 0))
    return torch.rsqrt(variance + epsilon) if invert else torch.sqrt(variance)


@ge_op("ReduceStdV2")
@in_fp32
def reduce_std(
    x: Tensor,
    *,
    dim: list[int] = [],  # noqa: B006  (read only)
    correction: int = 1,
    keepdim: bool = False,
    is_mean_out: bool = True,
) -> tuple[Tensor, Tensor]:
    """Standard deviation, and the mean where it is asked for (else an empty tensor)."""
    dims = dim or list(range(x.dim()))
    std = torch.std(x, dims, correction=correction, keepdim=keepdim)
    return std, torch.mean(x, dims, keepdim=keepdim) if is_mean_out else x.new_empty(0)


@ge_op("LpNormV2")
@in_fp32
def lp_norm(
    x: Tensor,
    *,
    p: float = 2.0,
    axes: list[int] = [],  # noqa: B006  (read only)
    keepdim: bool = False,
    epsilon: float = 1e-12,
) -> Tensor:
    """The p-norm; the largest and smallest int32 stand for p = inf and -inf."""
    order = {2147483647.0: float("inf"), 2147483648.0: float("inf"), -2147483648.0: -float("inf")}
    norm = torch.linalg.vector_norm(x, order.get(p, p), axes or None, keepdim=keepdim)
    return norm.clamp_min(epsilon) if epsilon else norm


@ge_op("Cumsum")
def cumsum(x: Tensor, axis: Int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum in the dtype of x; `exclusive` leaves the element itself out."""
    return _scan(torch.cumsum, x, axis, exclusive, reverse, neutral=0)


@ge_op("Cumprod")
@in_fp32
def cumprod(x: Tensor, axis: Int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    return _scan(torch.cumprod, x, axis, exclusive, reverse, neutral=1)


def _scan(
    function: Callable[..., Tensor],
    x: Tensor,
    axis: int,
    exclusive: bool,
    reverse: bool,
    neutral: int,
) -> Tensor:
    if x.dim() == 0:
        raise KernelError("x", "a scalar", "at least one dimension")
    x = x.flip(axis) if reverse else x
    result = function(x, axis, dtype=x.dtype)
    if exclusive and x.shape[axis]:
        first = torch.full_like(result.narrow(axis, 0, 1), neutral)
        result = torch.cat([first, result.narrow(axis, 0, x.shape[axis] - 1)], axis)
    return result.flip(axis) if reverse else result


@ge_op("ArgMaxV2", "ArgMax")
def arg_max(x: Tensor, dimension: Int, *, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.argmax(x, dimension).to(dtype)


@ge_op("ArgMin")
def arg_min(x: Tensor, dimension: Int, *, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.argmin(x, dimension).to(dtype)


@ge_op("ArgMaxWithValue")
def arg_max_with_value(
    x: Tensor, *, dimension: int, keep_dims: bool = False
) -> tuple[Tensor, Tensor]:
    values, indices = torch.max(x, dimension, keepdim=keep_dims)
    return indices.int(), values


@ge_op("ArgMinWithValue")
def arg_min_with_value(
    x: Tensor, *, dimension: int, keep_dims: bool = False
) -> tuple[Tensor, Tensor]:
    values, indices = torch.min(x, dimension, keepdim=keep_dims)
    return indices.int(), values
