"""Kernels of the emulated device for operators that only torch_npu has, forward and backward.

Each is a plain function of CPU tensors. Low-precision inputs are computed in fp32 and rounded once,
as the device does. Source of the semantics: the torch_npu API reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

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
    "npu::_npu_dtype_cast": dtype_cast,
    "npu::_npu_dtype_cast_backward": dtype_cast,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_dtype_cast": dtype_cast,
    "npu::npu_dtype_cast_": dtype_cast_,
    "npu::npu_dtype_cast_backward": dtype_cast,
    "npu::_npu_format_cast": format_cast,
    "npu::npu_format_cast": format_cast,
    "npu::npu_format_cast_.acl_format": format_cast_,
    "npu::npu_gelu": gelu,
    "npu::npu_gelu_backward": gelu_backward,
    "npu::npu_linear": F.linear,
    "npu::npu_linear_backward": linear_backward,
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rms_norm_backward": rms_norm_backward,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_rotary_mul_backward": rotary_mul_backward,
    "npu::npu_silu": F.silu,
    "npu::npu_silu_backward": silu_backward,
    "npu::npu_swiglu": swiglu,
    "npu::npu_swiglu_backward": swiglu_backward,
}
"""Functions on CPU tensors, by the name of the operator that they are the device's kernel of."""
