"""Ops that change shape or layout only, and the reading of shapes."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.registry import Int, Ints, Tensor, Tensors, ge_op


@ge_op("Shape")
def shape(x: Tensor, *, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(x.shape, dtype=dtype)


@ge_op("ShapeN")
def shape_n(x: Tensors, *, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(each.shape, dtype=dtype) for each in x)


@ge_op("Size")
def size(x: Tensor, *, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(x.numel(), dtype=dtype)


@ge_op("Rank")
def rank(x: Tensor) -> Tensor:
    return torch.tensor(x.dim(), dtype=torch.int32)


@ge_op("Identity", "StopGradient", "PreventGradient", view=True)
def identity(x: Tensor) -> Tensor:
    return x


@ge_op("IdentityN")
def identity_n(x: Tensors) -> tuple[Tensor, ...]:
    return tuple(each.clone() for each in x)


@ge_op("TensorMove", pure=False)
def tensor_move(x: Tensor) -> Tensor:
    """A copy with memory of its own, which ops that write in place rely on."""
    return x.clone(memory_format=torch.contiguous_format)


@ge_op("Reshape", view=True)
def reshape(x: Tensor, shape: Ints, *, axis: int = 0, num_axes: int = -1) -> Tensor:
    """Reshape dims `axis` .. `axis + num_axes` to `shape`; by default all of them."""
    if axis == 0 and num_axes == -1:
        return x.reshape(shape)
    start = axis % (x.dim() + 1)
    end = x.dim() if num_axes == -1 else start + num_axes
    return x.reshape([*x.shape[:start], *shape, *x.shape[end:]])


@ge_op("FlattenV2", view=True)
def flatten(x: Tensor, *, axis: int = 1, end_axis: int = -1) -> Tensor:
    return x.flatten(axis, end_axis)


@ge_op("Squeeze", view=True)
def squeeze(x: Tensor, *, axis: list[int] = []) -> Tensor:  # noqa: B006  (read only)
    """Drop dims of size 1: those of `axis`, or all."""
    if not axis:
        return x.squeeze()
    for each in axis:
        if x.shape[each] != 1:
            raise KernelError("axis", f"{each}, of size {x.shape[each]}", "a dim of size 1")
    return x.squeeze(tuple(axis))


@ge_op("Unsqueeze", view=True)
def unsqueeze(x: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006  (read only)
    """Insert dims of size 1 at the positions `axes` of the result."""
    result_rank = x.dim() + len(axes)
    for position in sorted(axis % result_rank for axis in axes):
        x = x.unsqueeze(position)
    return x


@ge_op("ExpandDims", view=True)
def expand_dims(x: Tensor, axis: Int) -> Tensor:
    return x.unsqueeze(axis)


@ge_op("Transpose", view=True)
def transpose(x: Tensor, perm: Ints) -> Tensor:
    return x.permute(perm)


@ge_op("Permute", view=True)
def permute(x: Tensor, *, order: list[int]) -> Tensor:
    return x.permute(order)


@ge_op("BroadcastTo", view=True)
def broadcast_to(x: Tensor, shape: Ints) -> Tensor:
    return x.expand(shape)


@ge_op("Expand", view=True)
def expand(x: Tensor, shape: Ints) -> Tensor:
    """Broadcast x and `shape` against each other; -1 keeps the dim of x."""
    lead = len(shape) - x.dim()
    target = [x.shape[i - lead] if dim == -1 else dim for i, dim in enumerate(shape)]
    return x.expand(torch.broadcast_shapes(x.shape, target))


@ge_op("Tile")
def tile(x: Tensor, multiples: Ints) -> Tensor:
    return x.repeat(multiples)


@ge_op("ConcatV2", ignored=("N",))
def concat(x: Tensors, concat_dim: Int) -> Tensor:
    return _concat(x, concat_dim)


@ge_op("ConcatD", ignored=("N",))
def concat_d(x: Tensors, *, concat_dim: int) -> Tensor:
    return _concat(x, concat_dim)


def _concat(x: Tensors, dim: int) -> Tensor:
    """Concatenate; a scalar counts as a vector of one element.

    An empty vector fits everywhere, as in PyTorch: key-value caches start as one.
    """
    x = [each.reshape(1) if each.dim() == 0 else each for each in x]
    x = [each for each in x if each.shape != (0,)] or x[:1]
    if len({each.dtype for each in x}) > 1:
        raise KernelError("x", f"dtypes {[each.dtype for each in x]}", "one dtype")
    if len({each.dim() for each in x}) > 1:
        raise KernelError("x", f"shapes {[tuple(each.shape) for each in x]}", "one rank")
    return torch.cat(list(x), dim)


@ge_op("Pack", ignored=("N",))
def pack(x: Tensors, *, axis: int = 0) -> Tensor:
    """Stack. Scalars may mix int32 and int64, as TorchAir does when it packs a shape."""
    if len({each.dtype for each in x}) > 1 and not all(_is_size(each) for each in x):
        raise KernelError("x", f"dtypes {[each.dtype for each in x]}", "one dtype")
    return torch.stack(list(x), axis)


def _is_size(x: Tensor) -> bool:
    return x.dim() == 0 and x.dtype in (torch.int32, torch.int64)


@ge_op("Unpack")
def unpack(x: Tensor, *, num: int, axis: int = 0) -> tuple[Tensor, ...]:
    if x.shape[axis] != num:
        raise KernelError("num", num, f"{x.shape[axis]}, the size of dim {axis}")
    return torch.unbind(x, axis)


@ge_op("SplitV")
def split_v(x: Tensor, size_splits: Ints, split_dim: Int, *, num_split: int) -> tuple[Tensor, ...]:
    """Split into parts of given sizes, of which one may be -1: the rest."""
    if len(size_splits) != num_split:
        raise KernelError("size_splits", size_splits, f"{num_split} sizes")
    if -1 in size_splits:
        rest = x.shape[split_dim] - sum(each for each in size_splits if each != -1)
        size_splits = [rest if each == -1 else each for each in size_splits]
    return torch.split(x, size_splits, split_dim)


@ge_op("Split")
def split(split_dim: Int, x: Tensor, *, num_split: int) -> tuple[Tensor, ...]:
    """Split into `num_split` equal parts."""
    if x.shape[split_dim] % num_split:
        raise KernelError("num_split", num_split, f"a divisor of {x.shape[split_dim]}")
    return torch.chunk(x, num_split, split_dim)


@ge_op("Slice")
def slice_(x: Tensor, offsets: Ints, size: Ints) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, size, strict=True)):
        x = x.narrow(dim, start, x.shape[dim] - start if length == -1 else length)
    return x


@ge_op("StridedSliceV2", view=True)
def strided_slice_v2(
    x: Tensor,
    begin: Ints,
    end: Ints,
    axes: Ints | None,
    strides: Ints | None,
    *,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
) -> Tensor:
    """x[begin:end:stride] along `axes`; a mask bit says that a bound is open."""
    if ellipsis_mask or new_axis_mask:
        raise KernelError("ellipsis_mask, new_axis_mask", (ellipsis_mask, new_axis_mask), "0")
    axes = list(range(len(begin))) if axes is None else axes
    strides = [1] * len(begin) if strides is None else strides
    index: list[slice | int] = [slice(None)] * x.dim()
    for i, axis in enumerate(axes):
        if shrink_axis_mask >> i & 1:
            index[axis] = begin[i]
            continue
        if strides[i] <= 0:
            raise KernelError("strides", strides, "positive strides")
        start = None if begin_mask >> i & 1 else begin[i]
        index[axis] = slice(start, None if end_mask >> i & 1 else end[i], strides[i])
    return x[tuple(index)]


@ge_op("AsStrided")
def as_strided(x: Tensor, size: Ints, stride: Ints, storage_offset: Int) -> Tensor:
    """View x's elements, in row-major order, with other sizes and strides."""
    return x.contiguous().view(-1).as_strided(size, stride, storage_offset).clone()


@ge_op("ViewCopy", mutates="dst")
def view_copy(
    dst: Tensor,
    dst_size: Ints,
    dst_stride: Ints,
    dst_storage_offset: Int,
    src: Tensor,
    src_size: Ints,
    src_stride: Ints,
    src_storage_offset: Int,
) -> Tensor:
    """Copy a strided view of src into a strided view of dst."""
    source = src.contiguous().as_strided(src_size, src_stride, src_storage_offset)
    dst.as_strided(dst_size, dst_stride, dst_storage_offset).copy_(source)
    return dst


@ge_op("ReverseV2")
def reverse(x: Tensor, axis: Ints) -> Tensor:
    return torch.flip(x, axis)


@ge_op("Roll")
def roll(x: Tensor, *, shifts: list[int], dims: list[int] = []) -> Tensor:  # noqa: B006
    return torch.roll(x, shifts, dims)


@ge_op("Tril")
def tril(x: Tensor, *, diagonal: int = 0) -> Tensor:
    return torch.tril(x, diagonal)


@ge_op("Triu")
def triu(x: Tensor, *, diagonal: int = 0) -> Tensor:
    return torch.triu(x, diagonal)
