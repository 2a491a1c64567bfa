"""Gradient of the torch op of MoeFinalizeRoutingV2, in ops that TorchAir can lower.

``MoeFinalizeRoutingV2Grad`` gives the gradients of the rows and the scales. It knows only row-major
index lists, so column-major ones are transposed first, and on A2 only one dtype, so bfloat16 rows
with float32 scales go through float32. The gradient of the bias is one matrix product. Zero, copy
and constant experts are unknown to the gradient op, so that calls with such have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.finalize_routing.special_experts import RANGES, has_special_experts
from moe_graph.ops.opdef import Autograd


def is_row_major(drop_pad_mode: int) -> bool:
    """True when copy k of token i stands at ``i * K + k`` of the index list."""
    return drop_pad_mode in (2, 3)


def has_drops(drop_pad_mode: int) -> bool:
    """True for the drop/pad modes, where index -1 is a dropped copy."""
    return drop_pad_mode in (1, 3)


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(
        op.expanded_x,
        op.expanded_row_idx,
        op.scales,
        op.bias,
        op.expert_idx if op.bias is not None else None,
    )
    ctx.drop_pad_mode = op.drop_pad_mode
    ctx.k = op.k
    ctx.has_special_experts = has_special_experts(op)
    ctx.has_x1, ctx.has_x2 = op.x1 is not None, op.x2 is not None


def _backward(ctx: Any, grad_y: torch.Tensor) -> dict[str, torch.Tensor | None]:
    if ctx.has_special_experts:
        raise NotImplementedError(
            f"moe_finalize_routing has no gradient with {', '.join(RANGES)}: "
            "MoeFinalizeRoutingV2Grad does not know such experts"
        )
    expanded_x, row_idx, scales, bias, expert_idx = ctx.saved_tensors
    weights = scales
    if weights is None and ctx.k > 1:
        # The gradient op reads K off the scales.
        weights = grad_y.new_ones((grad_y.shape[0], ctx.k))
    top_k = 1 if weights is None else int(weights.shape[1])
    if not is_row_major(ctx.drop_pad_mode) and top_k > 1:
        row_idx = row_idx.view(top_k, grad_y.shape[0]).t().reshape(-1)
    grads: dict[str, torch.Tensor | None] = {
        "x1": grad_y if ctx.has_x1 else None,
        "x2": grad_y if ctx.has_x2 else None,
    }
    grad_rows, grad_scales = _grad_rows_and_scales(
        ctx, grad_y, row_idx, expanded_x, weights, expert_idx, bias
    )
    grads["expanded_x"] = grad_rows
    if scales is not None:
        grads["scales"] = grad_scales
    if bias is not None:
        grads["bias"] = _grad_bias(ctx, grad_y, row_idx, weights, expert_idx, bias)
    return grads


def _grad_rows_and_scales(
    ctx: Any,
    grad_y: torch.Tensor,
    row_idx: torch.Tensor,
    expanded_x: torch.Tensor,
    weights: torch.Tensor | None,
    expert_idx: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    drops = has_drops(ctx.drop_pad_mode)
    # On A2 the gradient op has no column that mixes dtypes, so mixed calls run in fp32.
    mixed = weights is not None and weights.dtype != grad_y.dtype

    def uniform(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to(torch.float32) if mixed and tensor is not None else tensor

    grad_rows, grad_scales = torch.ops.moe_graph.moe_finalize_routing_v2_grad(
        uniform(grad_y),
        row_idx,
        None if weights is None else uniform(expanded_x),
        uniform(weights),
        expert_idx,
        uniform(bias),
        1 if drops else 0,
        0,
        int(expanded_x.shape[0]) if drops else 0,
        int(expanded_x.shape[1]) if drops else 0,
    )
    if mixed:
        assert weights is not None
        return grad_rows.to(expanded_x.dtype), grad_scales.to(weights.dtype)
    return grad_rows, grad_scales


def _grad_bias(
    ctx: Any,
    grad_y: torch.Tensor,
    row_idx: torch.Tensor,
    weights: torch.Tensor | None,
    expert_idx: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """``grad_bias[e] = sum over copies of expert e of weight * grad_y``, as one matrix product."""
    tokens = grad_y.shape[0]
    if weights is None:
        weights = grad_y.new_ones((tokens, 1))
    weights = weights.to(torch.float32)
    if has_drops(ctx.drop_pad_mode):
        kept = (row_idx >= 0).view(tokens, weights.shape[1])
        weights = weights * kept.to(torch.float32)
    per_expert = torch.zeros(
        (tokens, bias.shape[0]), dtype=torch.float32, device=grad_y.device
    ).scatter_add(1, expert_idx.to(torch.int64), weights)
    return torch.mm(per_expert.t(), grad_y.to(torch.float32)).to(bias.dtype)


AUTOGRAD = Autograd(_save, _backward)
