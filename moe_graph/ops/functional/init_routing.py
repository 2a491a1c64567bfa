"""Public functions that bring token copies into expert order."""

from __future__ import annotations

import torch

__all__ = ["moe_init_routing", "moe_init_routing_grad"]

_ops = torch.ops.moe_graph


def moe_init_routing(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = 0,
    expert_capacity: int = 0,
    expert_num: int = 0,
    drop_pad_mode: int = 0,
    expert_tokens_count_or_cumsum_flag: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort token copies by expert and gather their rows (GE ``MoeInitRoutingV2``). Has a gradient.

    Args:
        x: ``[T, H]`` float16, bfloat16 or float32.
        expert_idx: ``[T, K]`` int32 (Ascend 950: also int64), each in ``[0, expert_num)``.
        active_num: keep this many rows, 0 all; without drop/pad only.
        expert_capacity: C, rows per expert with drop/pad.
        expert_num: E; needed for counts and for drop/pad.
        drop_pad_mode: 0 keeps every copy, 1 drops beyond C and pads to C.
        expert_tokens_count_or_cumsum_flag: 0 none, 1 running sum, 2 count of copies per expert;
            without drop/pad only.
        expert_tokens_before_capacity_flag: count copies per expert before dropping; drop/pad only.

    Returns:
        ``expanded_x`` ``[R, H]`` (``[E, C, H]`` with drop/pad), ``expanded_row_idx`` ``[T * K]``
        int32 (row of each copy, -1 dropped), the counts ``[E]`` int32 or ``[0]``, the counts before
        dropping ``[E]`` int32 or ``[0]``.

    Raises:
        OpError: a dtype, shape, attribute or expert id that the op does not take.
    """
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    outputs = _ops.moe_init_routing_v2(
        x,
        expert_idx,
        active_num,
        expert_capacity,
        expert_num,
        drop_pad_mode,
        expert_tokens_count_or_cumsum_flag,
        expert_tokens_before_capacity_flag,
    )
    return outputs


def moe_init_routing_grad(
    grad_expanded_x: torch.Tensor,
    expanded_row_idx: torch.Tensor,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> torch.Tensor:
    """Gradient of :func:`moe_init_routing` with respect to x (GE ``MoeInitRoutingV2Grad``).

    Args:
        grad_expanded_x: ``[R, H]``, or ``[E, C, H]`` with drop/pad.
        expanded_row_idx: ``[T * K]`` int32, as :func:`moe_init_routing` returned it.
        top_k: K.
        drop_pad_mode: that of the forward.
        active_num: rows of `grad_expanded_x` when the forward cut them off, else 0.

    Returns:
        ``[T, H]``, the dtype of `grad_expanded_x`; fp32 sums in the order of the product.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    grad_x: torch.Tensor = _ops.moe_init_routing_v2_grad(
        grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num
    )
    return grad_x
