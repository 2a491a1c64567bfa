"""Ops that make tensors out of shapes and scalars."""

from __future__ import annotations

import ctypes

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.poison import poisoned
from moe_graph.emulator.engine.registry import Int, Ints, Tensor, ge_op


@ge_op("Fill")
def fill(dims: Ints, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise KernelError("value", f"shape {tuple(value.shape)}", "one element")
    return torch.empty(dims, dtype=value.dtype).fill_(value.reshape(()))


@ge_op("Empty", pure=False)
def empty(shape: Ints, *, dtype: torch.dtype = torch.int32, init: bool = False) -> Tensor:
    """Fresh memory: zero when `init`, else poisoned."""
    return torch.zeros(shape, dtype=dtype) if init else poisoned(shape, dtype)


@ge_op(
    "ConstPlaceHolder",
    view=True,
    pure=False,
    ignored=(
        "origin_format",
        "storage_format",
        "expand_dim_rules",
        "placement",
        "update_node_from_fx_input_idx",
    ),
)
def const_place_holder(
    *,
    origin_shape: list[int],
    storage_shape: list[int],
    dtype: torch.dtype,
    addr: int,
    size: int,
) -> Tensor:
    """The tensor at a device address that does not change: a frozen parameter."""
    if storage_shape != origin_shape:
        raise KernelError("storage_shape", storage_shape, f"{origin_shape}: a plain layout")
    count = _count(origin_shape)
    if count * dtype.itemsize > size:
        raise KernelError("size", f"{size} bytes", f"{count * dtype.itemsize}")
    memory = (ctypes.c_char * max(count * dtype.itemsize, 1)).from_address(addr)
    return torch.frombuffer(memory, dtype=dtype, count=count).reshape(origin_shape)


@ge_op("ZerosLike")
def zeros_like(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


@ge_op("OnesLike")
def ones_like(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=x.dtype)


@ge_op("Range", ignored=("is_closed",))
def range_(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """start, start + delta, ... below limit, in the common dtype of the three."""
    if delta.item() == 0:
        raise KernelError("delta", 0, "a step that is not 0")
    dtype = torch.promote_types(torch.promote_types(start.dtype, limit.dtype), delta.dtype)
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype)


@ge_op("LinSpace", same_dtype=("start", "stop"))
def lin_space(start: Tensor, stop: Tensor, num: Int) -> Tensor:
    return torch.linspace(start.item(), stop.item(), num, dtype=start.dtype)


@ge_op("Eye")
def eye(
    *,
    num_rows: int,
    num_columns: int = 0,
    batch_shape: list[int] = [],  # noqa: B006  (read only)
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    matrix = torch.eye(num_rows, num_columns or num_rows, dtype=dtype)
    return matrix.expand([*batch_shape, *matrix.shape]).contiguous()


@ge_op("OneHot", same_dtype=("on_value", "off_value"))
def one_hot(
    x: Tensor, depth: Int, on_value: Tensor, off_value: Tensor, *, axis: int = -1
) -> Tensor:
    """Insert a dim of size `depth`: `on_value` at position x, `off_value` elsewhere."""
    position = axis % (x.dim() + 1)
    classes = torch.arange(depth, dtype=x.dtype)
    classes = classes.reshape([-1] + [1] * (x.dim() - position))
    return torch.where(x.unsqueeze(position) == classes, on_value, off_value)


@ge_op("PadV3")
def pad(
    x: Tensor,
    paddings: Ints,
    constant_values: Tensor | None,
    *,
    mode: str = "constant",
    paddings_contiguous: bool = True,
) -> Tensor:
    """Pad every dim, the first dim first: (before, after) pairs, or all befores then all afters."""
    pairs = _pairs(paddings, x.dim(), paddings_contiguous)
    if mode == "constant":  # negative widths crop
        value = 0 if constant_values is None else constant_values.item()
        return torch.nn.functional.pad(x, _torch_order(pairs), value=value)
    return _pad_by_copy(x, pairs, {"edge": "replicate"}.get(mode, mode))


@ge_op("MirrorPad")
def mirror_pad(x: Tensor, paddings: Ints, *, mode: str) -> Tensor:
    """Reflect at the borders; only REFLECT, which leaves the border element out, is offered."""
    if mode.upper() != "REFLECT":
        raise KernelError("mode", mode, "REFLECT")
    return _pad_by_copy(x, _pairs(paddings, x.dim(), contiguous=True), "reflect")


@ge_op("PadV3Grad")
def pad_grad(
    x: Tensor, paddings: Ints, *, mode: str = "reflect", paddings_contiguous: bool = True
) -> Tensor:
    """Sum the gradient of a padded tensor back onto the elements that it was copied from."""
    pairs = _pairs(paddings, x.dim(), paddings_contiguous)
    inner = [size - before - after for size, (before, after) in zip(x.shape, pairs, strict=True)]
    wanted = {"edge": "replicate"}.get(mode, mode)
    source = _pad_by_copy(torch.arange(_count(inner)).reshape(inner), pairs, wanted)
    total = torch.zeros(_count(inner), dtype=torch.float32 if x.is_floating_point() else x.dtype)
    total.index_add_(0, source.reshape(-1), x.reshape(-1).to(total.dtype))
    return total.reshape(inner).to(x.dtype)


def _pad_by_copy(x: Tensor, pairs: list[tuple[int, int]], mode: str) -> Tensor:
    """Pad by copying elements of x: ``reflect`` or ``replicate``, one dim after the other."""
    if mode not in ("reflect", "replicate"):
        raise KernelError("mode", mode, "constant, reflect, edge or replicate")
    for dim, (before, after) in enumerate(pairs):
        if before or after:
            size = x.shape[dim]
            position = torch.arange(-before, size + after)
            if mode == "replicate":
                position = position.clamp(0, size - 1)
            else:
                if max(before, after) >= size:
                    raise KernelError("paddings", (before, after), f"less than dim size {size}")
                position = size - 1 - (size - 1 - position.abs()).abs()
            x = x.index_select(dim, position)
    return x


def _pairs(paddings: list[int], rank: int, contiguous: bool) -> list[tuple[int, int]]:
    if len(paddings) != 2 * rank:
        raise KernelError("paddings", f"{len(paddings)} numbers", f"{2 * rank}, two for each dim")
    if contiguous:
        return list(zip(paddings[::2], paddings[1::2], strict=True))
    return list(zip(paddings[:rank], paddings[rank:], strict=True))


def _torch_order(pairs: list[tuple[int, int]]) -> list[int]:
    return [width for pair in reversed(pairs) for width in pair]


def _count(sizes: list[int]) -> int:
    return torch.Size(sizes).numel()
