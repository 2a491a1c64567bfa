"""Public functions that bring rows back to token order."""

from __future__ import annotations

import torch

__all__ = ["moe_finalize_routing", "moe_finalize_routing_grad"]

_ops = torch.ops.moe_graph


def moe_finalize_routing(
    expanded_x: torch.Tensor,
    expanded_row_idx: torch.Tensor,
    x1: torch.Tensor | None = None,
    x2: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expert_idx: torch.Tensor | None = None,
    *,
    drop_pad_mode: int = 0,
    k: int = 1,
    x: torch.Tensor | None = None,
    a1: torch.Tensor | None = None,
    a2: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    zero_expert_range: tuple[int, int] = (-1, -1),
    copy_expert_range: tuple[int, int] = (-1, -1),
    constant_expert_range: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Bring rows back to token order and add them up (GE ``MoeFinalizeRoutingV2``). Has a gradient.

    Experts of the three ranges (Ascend 950) have no row in `expanded_x`; calls with such have no
    gradient. A range is ``(start, end)`` of expert ids, ``end`` excluded; ``(-1, -1)`` is none.

    Args:
        expanded_x: ``[T * K, H]``, or ``[E, C, H]`` in modes 1 and 3; float16, bfloat16, float32.
        expanded_row_idx: ``[T * K]`` int32.
        x1: ``[T, H]``, added.
        x2: ``[T, H]``, added; needs `x1`.
        bias: ``[E, H]``, added to each row of its expert; needs `expert_idx`.
        scales: ``[T, K]`` weights, the dtype of `expanded_x`, or float32 beside bfloat16; on Ascend
            950 any of the three.
        expert_idx: ``[T, K]`` int32.
        drop_pad_mode: 0, 1: row of copy (i, k) at ``k * T + i``; 2, 3: at ``i * K + k`` (what
            :func:`moe_init_routing` returns); 1, 3: drop/pad.
        k: K when `scales` is absent.
        x: ``[T, H]``, the tokens that copy and constant experts take for their row.
        a1: ``[n, H]`` for the n constant experts, which give ``a1 * x + a2 * v``.
        a2: ``[n, H]``.
        v: ``[n, H]``.
        zero_expert_range: experts whose copies are skipped.
        copy_expert_range: experts whose row is the token itself.
        constant_expert_range: experts whose row is ``a1 * x + a2 * v``.

    Returns:
        ``[T, H]``, the dtype of `expanded_x`.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
        NotImplementedError: in the backward pass, with experts of the three ranges.
    """
    y: torch.Tensor = _ops.moe_finalize_routing_v2(
        expanded_x,
        expanded_row_idx,
        x1,
        x2,
        bias,
        scales,
        expert_idx,
        x,
        a1,
        a2,
        v,
        drop_pad_mode,
        zero_expert_range,
        copy_expert_range,
        constant_expert_range,
        k,
    )
    return y


def moe_finalize_routing_grad(
    grad_y: torch.Tensor,
    expanded_row_idx: torch.Tensor,
    expanded_x: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expert_idx: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    drop_pad_mode: int = 0,
    active_num: int = 0,
    expert_num: int = 0,
    expert_capacity: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of :func:`moe_finalize_routing` (GE ``MoeFinalizeRoutingV2Grad``), row order only.

    Args:
        grad_y: ``[T, H]``.
        expanded_row_idx: ``[T * K]`` int32, copy (i, k) at ``i * K + k``.
        expanded_x: ``[R, H]`` or ``[E, C, H]``; needed with `scales`.
        scales: ``[T, K]``; absent means weight 1 and K = 1.
        expert_idx: ``[T, K]`` int32.
        bias: ``[E, H]``; needs `expert_idx`.
        drop_pad_mode: 0 dropless, 1 drop/pad.
        active_num: rows of `expanded_x` when the forward cut them off, else 0.
        expert_num: E, with drop/pad.
        expert_capacity: C, with drop/pad.

    Returns:
        ``grad_expanded_x``, shape of the expanded rows, and ``grad_scales`` ``[T, K]``
        (unwritten, NaN here, without `scales`).

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    grads: tuple[torch.Tensor, torch.Tensor] = _ops.moe_finalize_routing_v2_grad(
        grad_y,
        expanded_row_idx,
        expanded_x,
        scales,
        expert_idx,
        bias,
        drop_pad_mode,
        active_num,
        expert_num,
        expert_capacity,
    )
    return grads
