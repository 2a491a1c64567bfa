"""Softmax, log-softmax, their gradients, and losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Tensor, ge_op

aten = torch.ops.aten
_LAST = [-1]


@ge_op("SoftmaxV2")
def softmax(x: Tensor, *, axes: list[int] = _LAST, half_to_float: bool = False) -> Tensor:
    """Softmax over one axis; `half_to_float` gives fp32 for fp16 inputs."""
    dtype = torch.float32 if half_to_float else None
    return _along_last(lambda each: torch.softmax(each, -1, dtype=dtype), _one(axes), x)


@ge_op("SoftmaxGrad", same_dtype=("softmax", "grad_softmax"))
def softmax_grad(softmax: Tensor, grad_softmax: Tensor, *, axes: list[int] = _LAST) -> Tensor:
    return aten._softmax_backward_data(grad_softmax, softmax, _one(axes), softmax.dtype)


@ge_op("LogSoftmaxV2")
def log_softmax(logits: Tensor, *, axes: list[int] = _LAST) -> Tensor:
    return _along_last(lambda each: torch.log_softmax(each, -1), _one(axes), logits)


@ge_op("LogSoftmaxGrad", same_dtype=("grad", "x"))
def log_softmax_grad(grad: Tensor, x: Tensor, *, axis: list[int] = _LAST) -> Tensor:
    """Grad - exp(x) * sum(grad), x being the log-softmax."""
    return aten._log_softmax_backward_data(grad, x, _one(axis), x.dtype)


def _along_last(function: Callable[[Tensor], Tensor], axis: int, x: Tensor) -> Tensor:
    """Apply a softmax of the last dim to another one.

    PyTorch's own kernels for inner dims give bits that depend on the number of threads.
    """
    if axis in (-1, x.dim() - 1) or x.dim() == 0:
        return function(x)
    return function(x.transpose(axis, -1).contiguous()).transpose(axis, -1)


def _one(axes: list[int]) -> int:
    if len(axes) != 1:
        raise KernelError("axes", axes, "one axis")
    return axes[0]


@ge_op("NLLLoss", same_dtype=("x", "weight"))
@in_fp32
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of [N, C] (or [C]) log-probabilities, and the weight that counted."""
    return aten.nll_loss_forward(x, target.long(), weight, _reduction(reduction), ignore_index)


@ge_op("NLLLossGrad", same_dtype=("x", "y_grad"))
@in_fp32
def nll_loss_grad(
    x: Tensor,
    y_grad: Tensor,
    target: Tensor,
    weight: Tensor,
    total_weight: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    return aten.nll_loss_backward(
        y_grad, x, target.long(), weight, _reduction(reduction), ignore_index, total_weight
    )


@ge_op("MseLoss", same_dtype=("predict", "label"))
@in_fp32
def mse_loss(predict: Tensor, label: Tensor, *, reduction: str = "mean") -> Tensor:
    return F.mse_loss(predict, label, reduction=reduction)


@ge_op("MseLossGrad", same_dtype=("predict", "label", "dout"))
@in_fp32
def mse_loss_grad(
    predict: Tensor, label: Tensor, dout: Tensor, *, reduction: str = "mean"
) -> Tensor:
    return aten.mse_loss_backward(dout, predict, label, _reduction(reduction))


@ge_op("SmoothL1LossV2", same_dtype=("predict", "label"))
@in_fp32
def smooth_l1_loss(
    predict: Tensor, label: Tensor, *, sigma: float = 1.0, reduction: str = "mean"
) -> Tensor:
    return F.smooth_l1_loss(predict, label, reduction=reduction, beta=sigma)


@ge_op("BinaryCrossEntropy", same_dtype=("x", "y", "weight"))
@in_fp32
def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Tensor | None, *, reduction: str = "mean"
) -> Tensor:
    return F.binary_cross_entropy(x, y, weight, reduction=reduction)


@ge_op("SigmoidCrossEntropyWithLogitsV2", same_dtype=("predict", "target", "weight", "pos_weight"))
@in_fp32
def binary_cross_entropy_with_logits(
    predict: Tensor,
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    *,
    reduction: str = "mean",
) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        predict, target, weight, reduction=reduction, pos_weight=pos_weight
    )


@ge_op("KLDiv", same_dtype=("x", "target"))
@in_fp32
def kl_div(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    return F.kl_div(x, target, reduction=reduction)


def _reduction(name: str) -> int:
    try:
        return {"none": 0, "mean": 1, "sum": 2}[name]
    except KeyError:
        raise KernelError("reduction", name, "none, mean or sum") from None
