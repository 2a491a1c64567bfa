"""Matrix products. Half-precision inputs are multiplied exactly and accumulated in fp32."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._sharing import matmul
from moe_graph.emulator.engine.registry import Tensor, ge_op

#: int8 offset, and permission to compute in a narrower format, which is not used.
_IGNORED = ("offset_x", "enable_hf32", "opImplMode")


@ge_op("MatMul", "MatMulV2", "MatMulV3", ignored=_IGNORED, same_dtype=("x1", "x2"))
def mat_mul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    *,
    transpose_x1: bool = False,
    transpose_x2: bool = False,
) -> Tensor:
    """[M, K] x [K, N] (+ bias [N]) -> [M, N]; each input may be stored transposed.

    A vector counts as one row (x1) or one column (x2), which the result does not have.
    """
    if x1.dim() not in (1, 2) or x2.dim() not in (1, 2):
        raise KernelError("x1, x2", f"ranks {x1.dim()} and {x2.dim()}", "rank 1 or 2")
    return _product(x1.t() if transpose_x1 else x1, x2.t() if transpose_x2 else x2, bias)


@ge_op("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", ignored=_IGNORED, same_dtype=("x1", "x2"))
def batch_mat_mul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    *,
    adj_x1: bool = False,
    adj_x2: bool = False,
) -> Tensor:
    """[..., M, K] x [..., K, N] (+ bias [N]) -> [..., M, N], batch dims broadcast."""
    if x1.dim() < 2 or x2.dim() < 2:
        raise KernelError("x1, x2", f"ranks {x1.dim()} and {x2.dim()}", "rank 2 or more")
    return _product(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2, bias)


@ge_op("Dot", same_dtype=("input_x", "input_y"))
def dot(input_x: Tensor, input_y: Tensor) -> Tensor:
    return torch.dot(input_x.float(), input_y.float()).to(input_x.dtype)


def _product(x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    inner = x2.shape[-2 if x2.dim() > 1 else 0]
    if x1.shape[-1] != inner:
        raise KernelError("x2", f"contracted dimension {inner}", f"{x1.shape[-1]}, that of x1")
    if x1.dtype is torch.float16:
        # not every CPU kernel of PyTorch accumulates fp16 in fp32
        product = matmul(x1.float(), x2.float())
        return (product if bias is None else product + bias).to(x1.dtype)
    if bias is None:
        return matmul(x1, x2)
    if x1.dtype is torch.bfloat16:
        return (matmul(x1.float(), x2.float()) + bias).to(x1.dtype)
    return matmul(x1, x2) + bias
