"""Kernels of the emulated device for PyTorch's own operators, where the CPU has none to lend.

Integers in ``histc``, softmax from half to float, and the gradients that torch_npu's autograd asks
for under names of its own (``npu_gather_backward``). Each is a plain function of CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_graph.emulator.eager_random import cpu_generator


def histc(tensor: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """``aten::histc``, also of integers, which the CPU refuses; in the dtype of the input."""
    if tensor.is_floating_point():
        return torch.histc(tensor, bins, min=min, max=max)
    return torch.histc(tensor.double(), bins, min=min, max=max).to(tensor.dtype)


def softmax(tensor: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """``aten::_softmax``; with `half_to_float` the result is fp32."""
    return torch._softmax(tensor.float() if half_to_float else tensor, dim, False)


def log_softmax(tensor: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """``aten::_log_softmax``; with `half_to_float` the result is fp32."""
    return torch._log_softmax(tensor.float() if half_to_float else tensor, dim, False)


def matmul_backward(
    grad: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``aten::matmul_backward``: gradients of both factors, where `mask` asks for them.

    torch_npu differentiates ``matmul`` as one operator; the CPU only knows its parts.
    """
    if grad is None:
        return None, None
    a = left.unsqueeze(0) if left.dim() == 1 else left
    b = right.unsqueeze(-1) if right.dim() == 1 else right
    if left.dim() == 1:
        grad = grad.unsqueeze(-1 if right.dim() == 1 else -2)
    if right.dim() == 1:
        grad = grad.unsqueeze(-1)
    if b.dim() == 2:
        # The CPU folds the batch into the rows of one product, forward and backward.
        rows, columns = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
        d_left = torch.mm(columns, b.t()).view(a.shape) if mask[0] else None
        d_right = torch.mm(rows.t(), columns) if mask[1] else None
    else:
        d_left = torch.matmul(grad, b.mT).sum_to_size(a.shape) if mask[0] else None
        d_right = torch.matmul(a.mT, grad).sum_to_size(b.shape) if mask[1] else None
    return (
        d_left.reshape(left.shape) if d_left is not None else None,
        d_right.reshape(right.shape) if d_right is not None else None,
    )


def matmul_double_backward(
    grad_left: torch.Tensor | None,
    grad_right: torch.Tensor | None,
    grad: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """``npu::matmul_double_backward``: gradients of `grad`, `left` and `right`.

    `grad_left` and `grad_right` are those of the results of :func:`matmul_backward`.
    """
    d_grad = d_left = d_right = None
    if grad_left is not None and mask[0]:
        d_grad = torch.matmul(grad_left, right)
    if grad_right is not None and mask[0]:
        term = torch.matmul(left, grad_right)
        d_grad = term if d_grad is None else d_grad + term
    if grad_right is not None and mask[1]:
        d_left = matmul_backward(grad, left, grad_right, (True, False))[0]
    if grad_left is not None and mask[2]:
        d_right = matmul_backward(grad, grad_left, right, (False, True))[1]
    return d_grad, d_left, d_right


def l1_loss_backward(
    grad: torch.Tensor, tensor: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """``npu::l1_loss_backward``; `reduction` is 0 none, 1 mean, 2 sum."""
    scale = 1.0 / tensor.numel() if reduction == 1 else 1.0
    return torch.sign(tensor - target) * grad * scale


def kl_div_backward(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    target: torch.Tensor,
    reduction: int = 1,
    *,
    log_target: bool = False,
) -> torch.Tensor:
    """``npu::kl_div_backward``; `reduction` is 0 none, 1 mean, 2 sum."""
    scale = 1.0 / tensor.numel() if reduction == 1 else 1.0
    if log_target:
        return -target.exp() * grad * scale
    return torch.where(target > 0, -target * grad * scale, 0.0)


def repeat_interleave_backward_int(
    grad: torch.Tensor, tensor: torch.Tensor, repeats: int, dim: int | None = None
) -> torch.Tensor:
    """``npu::repeat_interleave_backward_int``: sum over the copies of each element."""
    if dim is None:
        return grad.reshape(-1, repeats).sum(1).view(tensor.shape)
    dim %= tensor.dim()
    return grad.unflatten(dim, (tensor.shape[dim], repeats)).sum(dim + 1)


def repeat_interleave_backward_tensor(
    grad: torch.Tensor, tensor: torch.Tensor, repeats: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """``npu::repeat_interleave_backward_tensor``: sum over the copies of each element."""
    source = tensor.reshape(-1) if dim is None else tensor
    axis = 0 if dim is None else dim
    counts = repeats.expand(source.shape[axis])
    index = torch.repeat_interleave(torch.arange(source.shape[axis]), counts)
    return torch.zeros_like(source).index_add_(axis, index, grad).view(tensor.shape)


def gather_backward(
    grad: torch.Tensor, size: Sequence[int], dim: int, index: torch.Tensor, sparse_grad: bool
) -> torch.Tensor:
    """``npu::npu_gather_backward``: add each gradient to the element that was gathered."""
    return grad.new_zeros(size).scatter_add_(dim, index, grad)


def extremum_backward(
    grad: torch.Tensor, dim: int, indices: torch.Tensor, size: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """``npu::npu_max_backward``, ``npu_min_backward``: the gradient goes where the extremum was."""
    if not keepdim and size:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(size).scatter_(dim, indices.long(), grad)


def dropout(tensor: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu::_npu_dropout``: the tensor after dropout, and which elements were kept."""
    keep = torch.rand(tensor.shape, generator=cpu_generator(None, None)) >= p
    return dropout_backward(tensor, keep, p), keep


def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``npu::npu_dropout_backward``: the gradient where `mask` kept the element."""
    return grad * mask.to(grad.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


def bce_with_logits_backward(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    """``npu::npu_binary_cross_entropy_with_logits_backward``; `reduction` 0 none, 1 mean, 2 sum."""
    probability = tensor.sigmoid()
    positive = target if pos_weight is None else pos_weight * target
    result = ((positive + 1 - target) * probability - positive) * grad
    if weight is not None:
        result = result * weight
    return result / tensor.numel() if reduction == 1 else result


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_log_softmax": log_softmax,
    "aten::_softmax": softmax,
    "aten::histc": histc,
    "aten::matmul_backward": matmul_backward,
    "npu::_npu_dropout": dropout,
    "npu::kl_div_backward": kl_div_backward,
    "npu::l1_loss_backward": l1_loss_backward,
    "npu::npu_binary_cross_entropy_with_logits_backward": bce_with_logits_backward,
    "npu::npu_dropout_backward": dropout_backward,
    "npu::npu_gather_backward": gather_backward,
    "npu::matmul_double_backward": matmul_double_backward,
    "npu::npu_max_backward": extremum_backward,
    "npu::npu_min_backward": extremum_backward,
    "npu::repeat_interleave_backward_int": repeat_interleave_backward_int,
    "npu::repeat_interleave_backward_tensor": repeat_interleave_backward_tensor,
}
"""Functions on CPU tensors, by the name of the operator that they are the device's kernel of."""
