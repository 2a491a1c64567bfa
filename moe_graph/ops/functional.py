"""The public functions: named and documented forms of ``torch.ops.moe_graph.*``.

Shapes: T tokens, H hidden size, K experts per token, E experts, C capacity, R rows grouped by
expert (``T * K`` unless said otherwise).
"""

from __future__ import annotations

import torch

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
) -> torch.Tensor:
    """Bring rows back to token order and add them up (GE ``MoeFinalizeRoutingV2``). Has a gradient.

    Args:
        expanded_x: ``[T * K, H]``, or ``[E, C, H]`` in modes 1 and 3; float16, bfloat16, float32.
        expanded_row_idx: ``[T * K]`` int32.
        x1: ``[T, H]``, added.
        x2: ``[T, H]``, added; needs `x1`.
        bias: ``[E, H]``, added to each row of its expert; needs `expert_idx`.
        scales: ``[T, K]`` weights, the dtype of `expanded_x`, or float32 beside bfloat16.
        expert_idx: ``[T, K]`` int32.
        drop_pad_mode: 0, 1: row of copy (i, k) at ``k * T + i``; 2, 3: at ``i * K + k`` (what
            :func:`moe_init_routing` returns); 1, 3: drop/pad.
        k: K when `scales` is absent.

    Returns:
        ``[T, H]``, the dtype of `expanded_x`.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    y: torch.Tensor = _ops.moe_finalize_routing_v2(
        expanded_x,
        expanded_row_idx,
        x1,
        x2,
        bias,
        scales,
        expert_idx,
        drop_pad_mode=drop_pad_mode,
        k=k,
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


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group_list: torch.Tensor,
    transpose_weight: bool = False,
    transpose_x: bool = False,
    group_type: int = 0,
    group_list_type: int = 0,
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix (GE ``GroupedMatmul``). Has a gradient.

    Args:
        x: ``[R, K]`` float16, bfloat16 or float32, rows sorted by group.
        weight: ``[G, K, N]``, or ``[G, N, K]`` with `transpose_weight`; ``[R, N]`` for
            ``group_type=2``.
        bias: ``[G, N]``; float16 beside float16, else float32. Not for ``group_type=2``.
        group_list: ``[G]`` int64, running sum of the group sizes or the sizes.
        transpose_weight: weights are stored ``[N, K]``.
        transpose_x: True exactly for ``group_type=2``.
        group_type: 0 groups the rows; 2 the inner dimension, ``x.T @ weight`` per group.
        group_list_type: 0 running sum, 1 sizes.

    Returns:
        ``[R, N]``, rows beyond the last group unwritten (NaN here); ``[G, K, N]`` for
        ``group_type=2``.

    Raises:
        OpError: a dtype, shape, attribute or group list that the op does not take.
    """
    y: torch.Tensor = _ops.grouped_matmul_single(
        x, weight, bias, group_list, transpose_weight, transpose_x, group_type, group_list_type
    )
    return y


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return ``silu(a) * b`` for ``a, b = x.chunk(2, dim)`` (GE ``SwiGlu``). Has a gradient.

    Args:
        x: float16, bfloat16 or float32, of even size in `dim`.
        dim: dimension that is halved.

    Raises:
        OpError: a dtype or shape that the op does not take.
    """
    y: torch.Tensor = _ops.swi_glu(x, dim)
    return y
