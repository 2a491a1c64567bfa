"""Gathering, scattering, selecting, sorting and counting."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32, widen
from moe_graph.emulator.engine.registry import Int, Ints, Tensor, Tensors, ge_op

_TUNING = ("validate_indices", "is_preprocessed", "use_locking")


@ge_op("Gather", ignored=_TUNING)
def gather(
    x: Tensor, indices: Tensor, *, batch_dims: int = 0, negative_index_support: bool = False
) -> Tensor:
    """x[indices] along the first dim."""
    return _gather(x, indices, 0, batch_dims)


@ge_op("GatherV2", ignored=_TUNING)
def gather_v2(
    x: Tensor,
    indices: Tensor,
    axis: Int,
    *,
    batch_dims: int = 0,
    negative_index_support: bool = False,
) -> Tensor:
    """x[..., indices, ...] with the dims of `indices` in place of dim `axis`."""
    return _gather(x, indices, axis, batch_dims)


def _gather(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Tensor:
    if batch_dims:
        raise KernelError("batch_dims", batch_dims, "0")
    if x.dim() == 0:
        raise KernelError("x", "a scalar", "at least one dimension")
    axis %= x.dim()
    rows = x.index_select(axis, _in_range("indices", indices.reshape(-1), x.shape[axis]))
    return rows.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _in_range(argument: str, indices: Tensor, size: int) -> Tensor:
    """Return `indices` counted from 0; a negative index counts from the end.

    Raises:
        KernelError: an index is outside [-size, size).
    """
    if indices.numel() == 0:
        return indices
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < -size or high >= size:
        raise KernelError(argument, f"values in [{low}, {high}]", f"in [{-size}, {size})")
    return torch.where(indices < 0, indices + size, indices) if low < 0 else indices


@ge_op("GatherElements")
def gather_elements(x: Tensor, index: Tensor, *, dim: int = 0) -> Tensor:
    return torch.gather(x, dim, _long_in_range("index", index, x, dim))


@ge_op("GatherNd", ignored=_TUNING)
def gather_nd(x: Tensor, indices: Tensor, *, negative_index_support: bool = False) -> Tensor:
    """x[indices[..., 0], indices[..., 1], ...]."""
    return x[tuple(indices.long().unbind(-1))]


@ge_op("IndexByTensor")
def index_by_tensor(x: Tensor, indices: Tensors, *, indices_mask: list[int] = []) -> Tensor:  # noqa: B006
    """x[i0, :, i1, ...]: `indices_mask` has 1 for every dim that has an index tensor."""
    return x[_index_tuple(x, indices, indices_mask)]


def _index_tuple(x: Tensor, indices: Tensors, mask: list[int]) -> tuple[Tensor | slice, ...]:
    if sum(mask) != len(indices):
        raise KernelError("indices", f"{len(indices)} tensors", f"{sum(mask)}, as in the mask")
    remaining = iter(indices)
    index: list[Tensor | slice] = []
    for dim, used in enumerate(mask):
        if not used:
            index.append(slice(None))
            continue
        each = next(remaining)
        if each.dtype is not torch.bool:
            each = _in_range("indices", each, x.shape[dim])
        index.append(each)
    return tuple(index)


@ge_op("IndexPutV2", mutates="x", same_dtype=("x", "value"))
def index_put(
    x: Tensor,
    value: Tensor,
    indexed_sizes: Ints,
    indexed_strides: Tensor,
    indices: Tensors,
    *,
    accumulate: bool = False,
) -> Tensor:
    """x[i0, :, i1, ...] = value, or += when `accumulate`; `indexed_sizes` has 1 for indexed dims.

    Sums of half-precision floats are taken in fp32.
    """
    index = _index_tuple(x, indices, indexed_sizes)
    if not accumulate:
        x[index] = value
        return x
    return x.copy_(_add_at(x, index, value))


def _add_at(x: Tensor, index: tuple[Tensor | slice, ...], value: Tensor) -> Tensor:
    """Return x with `value` added at an index, element after element, sums in fp32."""
    places = torch.arange(x.numel()).reshape(x.shape)[index]
    spread = widen(value).expand(places.shape).reshape(-1)
    return widen(x).reshape(-1).index_add(0, places.reshape(-1), spread).reshape(x.shape)


@ge_op("ScatterElements", same_dtype=("data", "updates"))
@in_fp32
def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    places = _long_in_range("indices", indices, data, axis)
    if reduction == "none":
        return torch.scatter(data, axis, places, updates)
    if reduction not in ("add", "mul"):
        raise KernelError("reduction", reduction, "none, add or mul")
    reduce = {"add": "sum", "mul": "prod"}[reduction]
    return torch.scatter_reduce(data, axis, places, updates, reduce)


def _long_in_range(argument: str, index: Tensor, x: Tensor, dim: int) -> Tensor:
    return _in_range(argument, index, x.shape[dim] if x.dim() else 1).long()


@ge_op("InplaceIndexAdd", mutates="var", same_dtype=("var", "updates"))
def inplace_index_add(
    var: Tensor, indices: Tensor, updates: Tensor, alpha: Tensor | None, *, axis: int
) -> Tensor:
    """var[indices] += alpha * updates along `axis`; half-precision sums are taken in fp32."""
    places = _in_range("indices", indices, var.shape[axis])
    factor = 1 if alpha is None else alpha.item()
    total = widen(var).index_add(axis, places, widen(updates), alpha=factor)
    return var.copy_(total)


@ge_op("ScatterUpdate", mutates="var", ignored=_TUNING, same_dtype=("var", "updates"))
def scatter_update(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """var[indices] = updates along the first dim."""
    var[_in_range("indices", indices, var.shape[0]).long()] = updates
    return var


@ge_op("ScatterAdd", mutates="var", ignored=_TUNING, same_dtype=("var", "updates"))
def scatter_add(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """var[indices] += updates along the first dim."""
    rows = _in_range("indices", indices.reshape(-1), var.shape[0])
    flat = widen(updates).reshape(rows.shape[0], *var.shape[1:])
    return var.copy_(widen(var).index_add(0, rows, flat))


@ge_op("ScatterNdUpdate", mutates="var", ignored=_TUNING, same_dtype=("var", "updates"))
def scatter_nd_update(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """var[indices[..., 0], indices[..., 1], ...] = updates."""
    var[tuple(indices.long().unbind(-1))] = updates
    return var


@ge_op("TensorScatterUpdate", same_dtype=("x", "updates"))
def tensor_scatter_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update(x.clone(), indices, updates)


@ge_op("ScatterNdAdd", mutates="var", ignored=_TUNING, same_dtype=("var", "updates"))
def scatter_nd_add(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """var[indices[..., 0], indices[..., 1], ...] += updates."""
    return var.copy_(_add_at(var, tuple(indices.long().unbind(-1)), updates))


@ge_op("TensorScatterAdd", same_dtype=("x", "updates"))
def tensor_scatter_add(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_add(x.clone(), indices, updates)


@ge_op(
    "Assign", mutates="ref", ignored=("validate_shape", "use_locking"), same_dtype=("ref", "value")
)
def assign(ref: Tensor, value: Tensor) -> Tensor:
    if ref.shape != value.shape:
        raise KernelError("value", f"shape {tuple(value.shape)}", f"shape {tuple(ref.shape)}")
    return ref.copy_(value)


@ge_op("EmbeddingDenseGrad")
@in_fp32
def embedding_dense_grad(
    grad: Tensor,
    indices: Tensor,
    *,
    num_weights: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Sum rows of `grad` into a table of `num_weights` rows by `indices`."""
    _in_range("indices", indices, num_weights)
    return torch.ops.aten.embedding_dense_backward(
        grad, indices, num_weights, padding_idx, scale_grad_by_freq
    )


@ge_op("UnsortedSegmentSum", ignored=_TUNING)
@in_fp32
def unsorted_segment_sum(x: Tensor, segment_ids: Tensor, num_segments: Int) -> Tensor:
    """Sum the rows of x that have the same id; a negative id is left out."""
    rows = x.reshape(segment_ids.numel(), *x.shape[segment_ids.dim() :])
    ids = segment_ids.reshape(-1)
    kept = ids >= 0
    _in_range("segment_ids", ids[kept], num_segments)
    total = torch.zeros(num_segments, *rows.shape[1:], dtype=x.dtype)
    return total.index_add(0, ids[kept], rows[kept])


@ge_op("SelectV2", same_dtype=("then", "else"))
def select(condition: Tensor, then: Tensor, else_: Tensor) -> Tensor:
    return torch.where(condition, then, else_)


@ge_op("MaskedFill", same_dtype=("x", "value"))
def masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    if value.dim() == 0:
        return torch.masked_fill(x, mask, value)
    return torch.where(mask, value, x)


@ge_op("MaskedScatter", same_dtype=("x", "updates"))
def masked_scatter(x: Tensor, mask: Tensor, updates: Tensor) -> Tensor:
    return torch.masked_scatter(x, mask, updates)


@ge_op("MaskedSelectV2", "MaskedSelect")
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(x, mask)


@ge_op("NonZero")
def non_zero(x: Tensor, *, transpose: bool = False, dtype: torch.dtype = torch.int64) -> Tensor:
    """Positions of the elements that are not zero, [n, rank] ([rank, n] when transposed)."""
    positions = torch.nonzero(x).to(dtype)
    return positions.t().contiguous() if transpose else positions


@ge_op("Sort")
def sort(
    x: Tensor, *, axis: int = -1, descending: bool = False, stable: bool = False
) -> tuple[Tensor, Tensor]:
    """Sorted values and int32 positions. Always stable, which an unstable sort may be."""
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=True)
    return values, indices.int()


@ge_op("TopKV2", ignored=("sort_policy",))
def top_k(
    x: Tensor, k: Int, *, sorted: bool = True, dim: int = -1, largest: bool = True
) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices.int()


@ge_op("SearchSorted", same_dtype=("sorted_sequence", "values"))
def search_sorted(
    sorted_sequence: Tensor,
    values: Tensor,
    sorter: Tensor | None,
    *,
    dtype: torch.dtype = torch.int64,
    right: bool = False,
) -> Tensor:
    return torch.searchsorted(sorted_sequence, values, right=right, sorter=sorter).to(dtype)


@ge_op("Histogram")
def histogram(x: Tensor, *, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Tensor:
    """Number of elements in each of `bins` equal intervals of [min, max], int32.

    min == max stands for the range of x; elements outside the range are not counted.
    """
    values = x.reshape(-1).double()
    return torch.histc(values, bins, min, max).int()


@ge_op("Bincount")
def bincount(array: Tensor, size: Int, weights: Tensor) -> Tensor:
    """Number (or weight) of elements equal to 0, 1, ..., size - 1."""
    inside = array.reshape(-1) < size
    ids = array.reshape(-1)[inside]
    amounts = weights.reshape(-1)[inside] if weights.numel() else torch.ones_like(ids)
    return torch.zeros(size, dtype=weights.dtype).index_add(0, ids, amounts.to(weights.dtype))
