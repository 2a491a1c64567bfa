"""Kernels of the emulated device for operators that the CPU has none for.

Some belong to torch_npu (``npu_swiglu``), some to ``aten`` but only for other devices
(``matmul_backward``, ``histc`` of integers). Each is a plain function of CPU tensors. Low-precision
inputs are computed in fp32 and rounded once, as the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from moe_graph.emulator.eager_random import cpu_generator

# c10::ScalarType numbers, as torch_npu's schemas pass a dtype in an int argument.
_DTYPE_CODES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the precision that the device computes in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


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


def gelu(tensor: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """``npu::npu_gelu``."""
    return F.gelu(tensor, approximate=approximate)


def gelu_backward(
    grad: torch.Tensor, tensor: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor:
    """``npu::npu_gelu_backward``."""
    return torch.ops.aten.gelu_backward(grad, tensor, approximate=approximate)


def linear_backward(
    grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu::npu_linear_backward``: gradients of the input and of the weight."""
    rows, columns = tensor.reshape(-1, tensor.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return torch.mm(columns, weight).view(tensor.shape), torch.mm(columns.t(), rows)


def _dtype_of(code: int | torch.dtype) -> torch.dtype:
    """The dtype that torch_npu passes as a number."""
    return code if isinstance(code, torch.dtype) else _DTYPE_CODES[code]


def dtype_cast(tensor: torch.Tensor, dtype: int | torch.dtype, _given: Any = None) -> torch.Tensor:
    """``npu::npu_dtype_cast``: a copy in `dtype`."""
    return tensor.to(_dtype_of(dtype), copy=True)


def dtype_cast_(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``npu::npu_dtype_cast_``: write `source` into `tensor`, in its dtype."""
    return tensor.copy_(source)


def format_cast(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``npu::npu_format_cast``: a copy. Memory formats are private to a device; here all are ND."""
    return tensor.clone()


def format_cast_(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``npu::npu_format_cast_``: nothing to do, see :func:`format_cast`."""
    return tensor


def silu_backward(grad: torch.Tensor, tensor: torch.Tensor, _result: torch.Tensor) -> torch.Tensor:
    """``npu::npu_silu_backward``."""
    return torch.ops.aten.silu_backward(grad, tensor)


def swiglu(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``npu::npu_swiglu``: silu of the first half along `dim`, times the second half."""
    gate, up = _wide(tensor).chunk(2, dim)
    return (F.silu(gate) * up).to(tensor.dtype)


def swiglu_backward(grad: torch.Tensor, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``npu::npu_swiglu_backward``: gradient of :func:`swiglu`."""
    gate, up = _wide(tensor).chunk(2, dim)
    wide_grad = _wide(grad)
    d_gate = torch.ops.aten.silu_backward(wide_grad * up, gate)
    return torch.cat([d_gate, wide_grad * F.silu(gate)], dim).to(tensor.dtype)


def _normalise(
    tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square normalisation over the dimensions of `gamma`, and 1 / rms in fp32."""
    dims = tuple(range(-gamma.dim(), 0))
    wide = tensor.float()
    rstd = (wide.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(tensor.dtype), rstd


def rms_norm(
    tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu::npu_rms_norm``: the normalised tensor, and 1 / rms in fp32."""
    return _normalise(tensor, gamma, epsilon)


def add_rms_norm(
    left: torch.Tensor, right: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu::npu_add_rms_norm``: the normalised sum, 1 / rms in fp32, and the sum."""
    total = left + right
    return (*_normalise(total, gamma, epsilon), total)


def rms_norm_backward(
    grad: torch.Tensor, tensor: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu::npu_rms_norm_backward``: gradients of the tensor, and of gamma in fp32."""
    dims = tuple(range(-gamma.dim(), 0))
    normal = tensor.float() * rstd
    scaled = grad.float() * gamma.float()
    d_tensor = rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    return d_tensor.to(tensor.dtype), (grad.float() * normal).sum_to_size(gamma.shape)


def _rotate(tensor: torch.Tensor, mode: str) -> torch.Tensor:
    """A quarter turn in each plane: of the two halves, or of neighbours."""
    if mode == "half":
        first, second = tensor.chunk(2, -1)
        return torch.cat([-second, first], -1)
    if mode == "interleave":
        return torch.stack([-tensor[..., 1::2], tensor[..., ::2]], -1).flatten(-2)
    raise ValueError(
        f"npu_rotary_mul, argument rotary_mode: got {mode!r}, want 'half' or 'interleave'"
    )


def rotary_mul(
    tensor: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``npu::npu_rotary_mul``: rotary position embedding of `tensor`."""
    if rotate is not None:
        raise ValueError("npu_rotary_mul, argument rotate: got a tensor, want None")
    wide = _wide(tensor)
    return (wide * _wide(cos) + _rotate(wide, rotary_mode) * _wide(sin)).to(tensor.dtype)


def rotary_mul_backward(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu::npu_rotary_mul_backward``: gradients of the tensor, the cosines and the sines."""
    wide_grad, wide = _wide(grad), _wide(tensor)
    d_tensor = wide_grad * _wide(cos) - _rotate(wide_grad * _wide(sin), rotary_mode)
    d_cos = (wide_grad * wide).sum_to_size(cos.shape)
    d_sin = (wide_grad * _rotate(wide, rotary_mode)).sum_to_size(sin.shape)
    return d_tensor.to(tensor.dtype), d_cos.to(cos.dtype), d_sin.to(sin.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_log_softmax": log_softmax,
    "aten::_softmax": softmax,
    "aten::histc": histc,
    "aten::matmul_backward": matmul_backward,
    "npu::_npu_dropout": dropout,
    "npu::_npu_dtype_cast": dtype_cast,
    "npu::_npu_dtype_cast_backward": dtype_cast,
    "npu::kl_div_backward": kl_div_backward,
    "npu::l1_loss_backward": l1_loss_backward,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_binary_cross_entropy_with_logits_backward": bce_with_logits_backward,
    "npu::npu_dropout_backward": dropout_backward,
    "npu::npu_dtype_cast": dtype_cast,
    "npu::npu_dtype_cast_": dtype_cast_,
    "npu::npu_dtype_cast_backward": dtype_cast,
    "npu::_npu_format_cast": format_cast,
    "npu::npu_format_cast": format_cast,
    "npu::npu_format_cast_.acl_format": format_cast_,
    "npu::npu_gather_backward": gather_backward,
    "npu::npu_gelu": gelu,
    "npu::npu_gelu_backward": gelu_backward,
    "npu::npu_linear": F.linear,
    "npu::npu_linear_backward": linear_backward,
    "npu::npu_max_backward": extremum_backward,
    "npu::npu_min_backward": extremum_backward,
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rms_norm_backward": rms_norm_backward,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_rotary_mul_backward": rotary_mul_backward,
    "npu::npu_silu": F.silu,
    "npu::npu_silu_backward": silu_backward,
    "npu::npu_swiglu": swiglu,
    "npu::npu_swiglu_backward": swiglu_backward,
    "npu::repeat_interleave_backward_int": repeat_interleave_backward_int,
    "npu::repeat_interleave_backward_tensor": repeat_interleave_backward_tensor,
}
"""Functions on CPU tensors, by the name of the operator that they are the device's kernel of."""
