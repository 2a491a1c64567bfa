"""Rotary position embeddings and their gradients."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.kernels._precision import in_fp32
from moe_graph.emulator.engine.registry import Tensor, ge_op


@ge_op("RotaryMul", same_dtype=("x", "r1", "r2"))
@in_fp32
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """X * r1 + rotate_half(x) * r2."""
    return x * r1 + _rotate_half(x) * r2


@ge_op("RotaryMulGrad", same_dtype=("x", "r1", "r2", "dy"))
@in_fp32
def rotary_mul_grad(
    x: Tensor, r1: Tensor, r2: Tensor, dy: Tensor, *, need_backward: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, r1 and r2."""
    dx = dy * r1 + _unrotate_half(dy * r2)
    return dx, (dy * x).sum_to_size(r1.shape), (dy * _rotate_half(x)).sum_to_size(r2.shape)


@ge_op("RotaryPositionEmbedding", same_dtype=("x", "cos", "sin"))
@in_fp32
def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, *, mode: int = 0) -> Tensor:
    """X * cos + rotate(x) * sin; mode 0 rotates halves, mode 1 neighbouring pairs."""
    if mode == 0:
        return x * cos + _rotate_half(x) * sin
    if mode == 1:
        return x * cos + _rotate_pairs(x) * sin
    raise KernelError("mode", mode, "0 (half) or 1 (interleave)")


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _unrotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, -first], -1)


def _rotate_pairs(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([-odd, even], -1).flatten(-2)
