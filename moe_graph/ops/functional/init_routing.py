"""Public functions that bring token copies into expert order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_graph.ops.errors import OpError

__all__ = ["moe_init_routing", "moe_init_routing_grad"]

_ops = torch.ops.moe_graph


def moe_init_routing(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = 0,
    expert_capacity: int = 0,
    expert_num: int = 0,
    drop_pad_mode: int = 0,
    expert_tokens_count_or_cumsum_flag: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    expert_tokens_num_type: int | None = None,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort token copies by expert and gather their rows. Has a gradient without quantisation.

    GE ``MoeInitRoutingV2``, or ``MoeInitRoutingV3`` when one of its arguments is given: `scale`,
    `offset`, `expert_tokens_num_type`, `quant_mode`, `active_expert_range`, `row_idx_type`. The two
    differ in how counts are asked for and in the last output.

    Args:
        x: ``[T, H]`` float16, bfloat16 or float32 (V3 without quantisation: also int8).
        expert_idx: ``[T, K]`` int32 (V2 on Ascend 950: also int64), each in ``[0, expert_num)``.
        scale: V3. ``[T]`` float32, carried along; ``[1]`` for ``quant_mode=0``; smoothing factors
            ``[1, H]`` or one row per active expert for ``quant_mode=1``.
        offset: V3. ``[1]`` float32 for ``quant_mode=0``.
        active_num: keep this many rows, 0 all; without drop/pad only.
        expert_capacity: C, rows per expert with drop/pad.
        expert_num: E; needed for counts, for drop/pad and for V3.
        drop_pad_mode: 0 keeps every copy, 1 drops beyond C and pads to C.
        expert_tokens_count_or_cumsum_flag: V2. 0 none, 1 running sum, 2 count of copies per expert;
            without drop/pad only.
        expert_tokens_before_capacity_flag: V2. Count copies per expert before dropping; drop/pad
            only.
        expert_tokens_num_type: V3. None no counts, 0 running sum, 1 count, 2 pairs (id, count).
        quant_mode: V3. -1 none, 0 static int8, 1 dynamic int8 (scales in the last output).
        active_expert_range: V3. ``(start, end)``: route only copies of these experts; the others
            sort behind them and get no row.
        row_idx_type: V3. 0: the row of each copy; 1: the copy of each row.

    Returns:
        ``expanded_x`` ``[R, H]`` (``[E, C, H]`` with drop/pad), ``expanded_row_idx`` ``[T * K]``
        int32 (row of each copy, -1 dropped or not routed), the counts (``[0]`` when not asked for;
        V2 ``[E]`` int32; V3 int64 ``[end - start]``, or ``[E, 2]`` pairs), and last: V2 the counts
        before dropping, ``[E]`` int32 or ``[0]``; V3 ``expanded_scale`` ``[R]`` float32, ``[0]``
        for ``quant_mode=0``. What no copy fills is unwritten: NaN, or a sentinel for integers.

    Raises:
        OpError: a dtype, shape, attribute or expert id that the op does not take, or arguments of
            both V2 and V3.
    """
    v3 = (
        scale is not None
        or offset is not None
        or expert_tokens_num_type is not None
        or quant_mode != -1
        or len(active_expert_range) > 0
        or row_idx_type != 0
    )
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    if not v3:
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
    if expert_tokens_count_or_cumsum_flag or expert_tokens_before_capacity_flag:
        raise OpError(
            "MoeInitRoutingV3",
            "expert_tokens_num_type",
            got="a flag of MoeInitRoutingV2 for the counts",
            want="expert_tokens_num_type 0 (running sum), 1 (count) or 2 (pairs)",
        )
    outputs = _ops.moe_init_routing_v3(
        x,
        expert_idx,
        scale,
        offset,
        active_num,
        expert_capacity,
        expert_num,
        drop_pad_mode,
        expert_tokens_num_type or 0,
        expert_tokens_num_type is not None,
        quant_mode,
        list(active_expert_range),
        row_idx_type,
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
