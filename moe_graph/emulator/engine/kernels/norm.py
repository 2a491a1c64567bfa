"""Normalisation layers and their gradients. Statistics are taken in fp32."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Ints, Tensor, ge_op

aten = torch.ops.aten


@ge_op("LayerNormV4")
def layer_norm(
    x: Tensor,
    normalized_shape: Ints,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    epsilon: float = 0.00001,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in the dtype of x, mean and 1 / std in fp32."""
    y, mean, rstd = aten.native_layer_norm(
        x.float(),
        normalized_shape,
        None if gamma is None else gamma.float(),
        None if beta is None else beta.float(),
        epsilon,
    )
    return y.to(x.dtype), mean, rstd


@ge_op("LayerNormGradV3", same_dtype=("dy", "x", "gamma"))
def layer_norm_grad(
    dy: Tensor, x: Tensor, rstd: Tensor, mean: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, gamma and beta."""
    wide, grad = x.float(), dy.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    lead = list(range(x.dim() - gamma.dim()))
    normed = (wide - mean.float()) * rstd.float()
    scaled = grad * gamma.float()
    centred = scaled - scaled.mean(dims, keepdim=True)
    dx = rstd.float() * (centred - normed * (scaled * normed).mean(dims, keepdim=True))
    dgamma, dbeta = (_sum_lead(each, lead) for each in (grad * normed, grad))
    return dx.to(x.dtype), dgamma.to(x.dtype), dbeta.to(x.dtype)


def _sum_lead(x: Tensor, lead: list[int]) -> Tensor:
    return x.sum(lead) if lead else x


@ge_op("RmsNorm")
def rms_norm(x: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """X / rms(x) * gamma over the trailing dims of gamma; also 1 / rms in fp32."""
    wide = x.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


@ge_op("RmsNormGrad", same_dtype=("dy", "x"))
def rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (its dtype) and gamma (fp32)."""
    wide, grad = x.float(), dy.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    normed = wide * rstd
    scaled = grad * gamma.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    lead = list(range(x.dim() - gamma.dim()))
    return dx.to(x.dtype), _sum_lead(grad * normed, lead)


@ge_op("AddRmsNorm", same_dtype=("x1", "x2"))
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, *, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rms_norm(x1 + x2), 1 / rms in fp32, and x1 + x2."""
    total = x1 + x2
    y, rstd = rms_norm(total, gamma, epsilon=epsilon)
    return y, rstd, total


@ge_op("GroupNorm", ignored=("data_format", "is_training"), same_dtype=("x", "gamma", "beta"))
@in_fp32
def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, *, num_groups: int, eps: float = 0.0001
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and variance of [N, groups]."""
    y, mean, rstd = _group_norm(x, gamma, beta, num_groups, eps)
    return y, mean, rstd.square().reciprocal() - eps


@ge_op("GroupNormV2", ignored=("data_format", "is_training"), same_dtype=("x", "gamma", "beta"))
@in_fp32
def group_norm_v2(
    x: Tensor, gamma: Tensor, beta: Tensor, *, num_groups: int, eps: float = 0.00001
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and 1 / std of [N, groups]."""
    return _group_norm(x, gamma, beta, num_groups, eps)


def _group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n, c = x.shape[:2]
    inner = x[0, 0].numel() if n and c else 1
    return aten.native_group_norm(x.contiguous(), gamma, beta, n, c, inner, groups, eps)


@ge_op(
    "GroupNormGrad",
    ignored=("data_format", "dx_is_require", "dgamma_is_require", "dbeta_is_require"),
    same_dtype=("dy", "x"),
)
@in_fp32
def group_norm_grad(
    dy: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, gamma: Tensor, *, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, gamma and beta."""
    n, c = x.shape[:2]
    return aten.native_group_norm_backward(
        dy.contiguous(), x.contiguous(), mean, rstd, gamma,
        n, c, x[0, 0].numel(), num_groups, [True, True, True],
    )  # fmt: skip


@ge_op("BNInfer")
@in_fp32
def bn_infer(
    x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float
) -> Tensor:
    """Batch norm with given statistics of dim 1."""
    return aten.native_batch_norm(x, scale, offset, mean, variance, False, 0.0, epsilon)[0]
