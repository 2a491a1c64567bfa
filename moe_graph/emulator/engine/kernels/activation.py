"""Activation functions and their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Number, Tensor, direct, ge_op

aten = torch.ops.aten

for _op_type, _function in {
    "HardSwish": F.hardswish,
    "LogSigmoid": F.logsigmoid,
    "Mish": F.mish,
    "Relu": torch.relu,
    "Relu6": F.relu6,
    "Selu": F.selu,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Tanh": torch.tanh,
}.items():
    direct(_function, "x")(_op_type)

direct(aten.hardswish_backward, "grad", "x")("HardSwishGrad")


@ge_op("SigmoidGrad", same_dtype=("y", "dy"))
def sigmoid_grad(y: Tensor, dy: Tensor, *, complex_conj: bool = False) -> Tensor:
    """Dy * y * (1 - y), y being the sigmoid."""
    _real_only(complex_conj)
    return aten.sigmoid_backward(dy, y)


@ge_op("TanhGrad", same_dtype=("y", "dy"))
def tanh_grad(y: Tensor, dy: Tensor, *, complex_conj: bool = False) -> Tensor:
    """Dy * (1 - y * y), y being the tanh."""
    _real_only(complex_conj)
    return aten.tanh_backward(dy, y)


def _real_only(complex_conj: bool) -> None:
    if complex_conj:
        raise KernelError("complex_conj", complex_conj, "False")


@ge_op("Swish")
@in_fp32
def swish(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """X * sigmoid(scale * x)."""
    return F.silu(x) if scale == 1.0 else x * torch.sigmoid(scale * x)


@ge_op("SwishGrad", same_dtype=("grad", "x"))
@in_fp32
def swish_grad(grad: Tensor, x: Tensor, y: Tensor | None, *, scale: float = 1.0) -> Tensor:
    """Gradient of :func:`swish`; its result y is not needed."""
    if scale == 1.0:
        return aten.silu_backward(grad, x)
    gate = torch.sigmoid(scale * x)
    return grad * gate * (1 + scale * x * (1 - gate))


@ge_op("SiluGrad", same_dtype=("dy", "x"))
def silu_grad(dy: Tensor, x: Tensor) -> Tensor:
    return aten.silu_backward(dy, x)


@ge_op("Gelu")
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@ge_op("GeluGrad", same_dtype=("dy", "x"))
def gelu_tanh_grad(dy: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """Gradient of :func:`gelu_tanh`; its result y is not needed."""
    return aten.gelu_backward(dy, x, approximate="tanh")


@ge_op("GeluV2")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@ge_op("GeluGradV2", same_dtype=("dy", "x"))
def gelu_grad(dy: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    return aten.gelu_backward(dy, x, approximate=approximate)


@ge_op("FastGelu")
@in_fp32
def fast_gelu(x: Tensor) -> Tensor:
    """X * sigmoid(1.702 x), in the form that does not overflow."""
    return x * torch.sigmoid(1.702 * x)


@ge_op("FastGeluGrad", same_dtype=("dy", "x"))
@in_fp32
def fast_gelu_grad(dy: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * x)
    return dy * gate * (1 + 1.702 * x * (1 - gate))


@ge_op("ReluGrad", same_dtype=("gradients", "features"))
def relu_grad(gradients: Tensor, features: Tensor) -> Tensor:
    return aten.threshold_backward(gradients, features, 0)


@ge_op("ThresholdGradV2D", same_dtype=("gradients", "features"))
def threshold_grad(gradients: Tensor, features: Tensor, *, threshold: float) -> Tensor:
    return aten.threshold_backward(gradients, features, threshold)


@ge_op("ThresholdV2", same_dtype=("x", "threshold", "value"))
def threshold_v2(x: Tensor, threshold: Number, value: Number | None) -> Tensor:
    """X where it is above the threshold, else `value`."""
    return F.threshold(x, threshold, 0 if value is None else value)


@ge_op("LeakyRelu")
def leaky_relu(x: Tensor, *, negative_slope: float = 0.0) -> Tensor:
    return F.leaky_relu(x, negative_slope)


@ge_op("LeakyReluGrad", same_dtype=("gradients", "features"))
def leaky_relu_grad(gradients: Tensor, features: Tensor, *, negative_slope: float = 0.0) -> Tensor:
    return aten.leaky_relu_backward(gradients, features, negative_slope, False)


@ge_op("Elu")
def elu(x: Tensor, *, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return aten.elu(x, alpha, scale, input_scale)


@ge_op("EluGradV2", same_dtype=("grads", "activations"))
def elu_grad(
    grads: Tensor,
    activations: Tensor,
    *,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
    is_result: bool = False,
) -> Tensor:
    return aten.elu_backward(grads, alpha, scale, input_scale, is_result, activations)


@ge_op("PRelu", same_dtype=("x", "weight"))
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """X where positive, else weight * x; `weight` belongs to dim 1 unless it broadcasts."""
    return torch.where(x > 0, x, _channel_wise(weight, x) * x)


@ge_op("PReluGrad", same_dtype=("grads", "features", "weights"))
@in_fp32
def prelu_grad(grads: Tensor, features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    weight = _channel_wise(weights, features)
    dx = torch.where(features > 0, grads, weight * grads)
    per_element = torch.where(features > 0, torch.zeros_like(grads), grads * features)
    da = per_element.sum_to_size(weight.shape) if weight.dim() else per_element.sum()
    return dx, da.reshape(weights.shape)


def _channel_wise(weight: Tensor, x: Tensor) -> Tensor:
    if weight.dim() != 1 or x.dim() < 2:
        return weight
    return weight.reshape([1, -1] + [1] * (x.dim() - 2))


@ge_op("HardSigmoid")
@in_fp32
def hard_sigmoid(input_x: Tensor, *, alpha: float = 0.16666666, beta: float = 0.5) -> Tensor:
    """clamp(alpha * x + beta, 0, 1)."""
    return torch.clamp(input_x * alpha + beta, 0, 1)


@ge_op("HardSigmoidGrad", same_dtype=("grads", "input_x"))
@in_fp32
def hard_sigmoid_grad(
    grads: Tensor, input_x: Tensor, *, alpha: float = 0.16666666, beta: float = 0.5
) -> Tensor:
    line = input_x * alpha + beta
    return torch.where((line > 0) & (line < 1), grads * alpha, torch.zeros_like(grads))


@ge_op("HardtanhGrad", same_dtype=("result", "grad"))
def hardtanh_grad(
    result: Tensor, grad: Tensor, *, min_val: float = -1.0, max_val: float = 1.0
) -> Tensor:
    return aten.hardtanh_backward(grad, result, min_val, max_val)


@ge_op("LogSigmoidGrad", same_dtype=("grads", "features"))
@in_fp32
def log_sigmoid_grad(grads: Tensor, features: Tensor) -> Tensor:
    return grads * torch.sigmoid(-features)


@ge_op("SoftplusV2")
def softplus(x: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return F.softplus(x, beta, threshold)


@ge_op("SoftplusV2Grad", same_dtype=("input_gradients", "input_features"))
def softplus_grad(
    input_gradients: Tensor,
    input_features: Tensor,
    *,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> Tensor:
    return aten.softplus_backward(input_gradients, input_features, beta, threshold)


@ge_op("GLU")
def glu(x: Tensor, *, dim: int = -1) -> Tensor:
    """First half of `dim` times the sigmoid of the second half."""
    return F.glu(x, dim)


@ge_op("GLUGrad", same_dtype=("y_grad", "x"))
def glu_grad(y_grad: Tensor, x: Tensor, *, dim: int = -1) -> Tensor:
    return aten.glu_backward(y_grad, x, dim)
