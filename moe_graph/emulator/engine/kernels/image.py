"""Convolution, pooling, resizing and grid sampling, all channels first.

TorchAir writes 2-D parameters as four numbers, ``[1, 1, h, w]`` for strides and dilations and
``[top, bottom, left, right]`` for pads; the 3-D ones have six pads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Ints, Tensor, ge_op

aten = torch.ops.aten
_CONV = ("offset_x", "data_format")


@ge_op("Conv2D", "Conv3D", ignored=_CONV, same_dtype=("x", "filter"))
@in_fp32
def conv(
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    offset_w: Tensor | None,
    *,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int = 1,
) -> Tensor:
    padding = _symmetric(pads)
    none = [0] * len(padding)
    return aten.convolution(
        x, filter, bias, strides[2:], padding, dilations[2:], False, none, groups
    )


@ge_op("Conv2DTranspose", "Conv3DTranspose", ignored=_CONV)
def conv_transpose(
    input_size: Ints,
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    offset_w: Tensor | None,
    *,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int = 1,
    output_padding: list[int],
) -> Tensor:
    result = aten.convolution(
        x.float(), filter.float(), None if bias is None else bias.float(),
        strides[2:], _symmetric(pads), dilations[2:], True, output_padding[2:], groups,
    )  # fmt: skip
    return _of_size(result, input_size).to(x.dtype)


@ge_op("Conv2DBackpropInput", "Conv3DBackpropInput", ignored=_CONV)
def conv_grad_input(
    input_size: Ints,
    filter: Tensor,
    out_backprop: Tensor,
    *,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int = 1,
) -> Tensor:
    x = torch.empty(input_size, dtype=torch.float32)
    grads = _conv_backward(
        out_backprop, x, filter, strides, pads, dilations, groups, [True, False, False]
    )
    return grads[0].to(filter.dtype)


@ge_op("Conv2DBackpropFilter", "Conv3DBackpropFilter", ignored=_CONV)
def conv_grad_filter(
    x: Tensor,
    filter_size: Ints,
    out_backprop: Tensor,
    *,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int = 1,
) -> Tensor:
    """Gradient of the filter, in fp32 as on the device."""
    filter = torch.empty(filter_size, dtype=torch.float32)
    grads = _conv_backward(
        out_backprop, x, filter, strides, pads, dilations, groups, [False, True, False]
    )
    return grads[1]


def _conv_backward(
    grad: Tensor,
    x: Tensor,
    filter: Tensor,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    padding = _symmetric(pads)
    return aten.convolution_backward(
        grad.float(), x.float(), filter.float(), None,
        strides[2:], padding, dilations[2:], False, [0] * len(padding), groups, mask,
    )  # fmt: skip


def _of_size(result: Tensor, size: list[int]) -> Tensor:
    if list(result.shape) != size:
        raise KernelError("input_size", size, f"{list(result.shape)}")
    return result


def _symmetric(pads: list[int]) -> list[int]:
    """Return one padding per spatial dim; the two sides must be alike."""
    if pads[::2] != pads[1::2]:
        raise KernelError("pads", pads, "the same padding on both sides")
    return pads[::2]


@ge_op("AvgPoolV2", ignored=("data_format", "padding_mode"))
def avg_pool(
    x: Tensor,
    *,
    ksize: list[int],
    strides: list[int],
    pads: list[int] = [0, 0, 0, 0],  # noqa: B006  (read only)
    global_pooling: bool = False,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: int = 0,
) -> Tensor:
    if global_pooling:
        raise KernelError("global_pooling", global_pooling, "False")
    return F.avg_pool2d(
        x, ksize[2:], strides[2:], _symmetric(pads), ceil_mode, not exclusive,
        divisor_override or None,
    )  # fmt: skip


@ge_op("AvgPoolV2Grad", ignored=("data_format", "padding_mode"))
@in_fp32
def avg_pool_grad(
    orig_input_shape: Tensor,
    input_grad: Tensor,
    *,
    ksize: list[int],
    strides: list[int],
    pads: list[int] = [0, 0, 0, 0],  # noqa: B006  (read only)
    global_pooling: bool = False,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: int = 0,
) -> Tensor:
    if global_pooling:
        raise KernelError("global_pooling", global_pooling, "False")
    x = torch.zeros(orig_input_shape.tolist(), dtype=input_grad.dtype)
    return aten.avg_pool2d_backward(
        input_grad, x, ksize[2:], strides[2:], _symmetric(pads), ceil_mode, not exclusive,
        divisor_override or None,
    )  # fmt: skip


@ge_op("AdaptiveAvgPool2d")
def adaptive_avg_pool(x: Tensor, *, output_size: list[int]) -> Tensor:
    return aten._adaptive_avg_pool2d(x, output_size)


@ge_op("AdaptiveAvgPool2dGrad")
def adaptive_avg_pool_grad(input_grad: Tensor, *, orig_input_shape: list[int]) -> Tensor:
    x = torch.zeros(orig_input_shape, dtype=input_grad.dtype)
    return aten._adaptive_avg_pool2d_backward(input_grad, x)


@ge_op("ResizeNearestNeighborV2")
def resize_nearest(
    x: Tensor, size: Ints, *, align_corners: bool = False, half_pixel_centers: bool = False
) -> Tensor:
    _plain_nearest(align_corners, half_pixel_centers)
    return aten.upsample_nearest2d(x, size)


@ge_op("ResizeNearestNeighborV2Grad")
def resize_nearest_grad(
    grads: Tensor, size: Ints, *, align_corners: bool = False, half_pixel_centers: bool = False
) -> Tensor:
    _plain_nearest(align_corners, half_pixel_centers)
    shape = [*grads.shape[:2], *size]
    return aten.upsample_nearest2d_backward(grads.float(), grads.shape[2:], shape).to(grads.dtype)


def _plain_nearest(align_corners: bool, half_pixel_centers: bool) -> None:
    if align_corners or half_pixel_centers:
        raise KernelError("align_corners, half_pixel_centers", "True", "False")


_INTERPOLATION = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}


@ge_op("GridSampler2D", "GridSampler3D", ignored=("data_format",), same_dtype=("x", "grid"))
@in_fp32
def grid_sampler(
    x: Tensor,
    grid: Tensor,
    *,
    interpolation_mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    sample = aten.grid_sampler_2d if x.dim() == 4 else aten.grid_sampler_3d
    return sample(
        x, grid, _INTERPOLATION[interpolation_mode], _PADDING[padding_mode], align_corners
    )


@ge_op("GridSampler2DGrad", same_dtype=("grad", "x", "grid"))
@in_fp32
def grid_sampler_grad(
    grad: Tensor,
    x: Tensor,
    grid: Tensor,
    *,
    interpolation_mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> tuple[Tensor, Tensor]:
    return aten.grid_sampler_2d_backward(
        grad, x, grid, _INTERPOLATION[interpolation_mode], _PADDING[padding_mode],
        align_corners, [True, True],
    )  # fmt: skip
