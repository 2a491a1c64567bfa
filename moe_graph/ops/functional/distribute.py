"""Public functions of expert parallelism."""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.distribute.quantisation import UNDEFINED

__all__ = ["moe_distribute_combine_v2", "moe_distribute_dispatch_v2"]

_ops = torch.ops.moe_graph


def moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    y_dtype: int | None = None,
    **attrs: Any,
) -> tuple[torch.Tensor, ...]:
    """Send token rows to the ranks of their experts (GE ``MoeDistributeDispatchV2``). No gradient.

    Shapes, dtypes and limits are checked, also in graphs; rows are not exchanged yet.

    Args:
        x: ``[BS, H]`` bfloat16 or float16.
        expert_ids: ``[BS, K]`` int32, without duplicates in a row.
        group_ep: name of the communication group.
        ep_world_size: its ranks.
        ep_rank_id: this rank.
        moe_expert_num: routed experts of all ranks.
        scales: smoothing factors ``[experts, H]`` float32, with quantisation.
        x_active_mask: ``[BS]`` (a prefix of True) or ``[BS, K]`` bool; the others are not sent.
        expert_scales: ``[BS, K]`` float32, for the layered exchange.
        elastic_info: ``[4 + 2 * ep_world_size]`` int32 (A3, Ascend 950).
        performance_info: ``[ep_world_size]`` int64.
        y_dtype: ge::DataType of the rows on Ascend 950, None for its default.
        **attrs: other attributes of the op, see ``python -m moe_graph ops
            MoeDistributeDispatchV2``.

    Returns:
        ``expand_x`` ``[A, H]``, ``dynamic_scales``, ``assist_info_for_combine`` ``[A * 128]``,
        ``expert_token_nums`` per local expert, ``ep_recv_count``, ``tp_recv_count`` and
        ``expand_scales``; A is the most that this rank can receive.

    Raises:
        OpError: a dtype, shape, attribute or size beyond the limits of the product.
        NotImplementedError: the op runs.
    """
    outputs: tuple[torch.Tensor, ...] = _ops.moe_distribute_dispatch_v2(
        x,
        expert_ids,
        scales,
        x_active_mask,
        expert_scales,
        elastic_info,
        performance_info,
        group_ep,
        ep_world_size,
        ep_rank_id,
        moe_expert_num,
        y_dtype=UNDEFINED if y_dtype is None else y_dtype,
        **attrs,
    )
    return outputs


def moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **inputs_and_attrs: Any,
) -> torch.Tensor:
    """Bring the experts' rows back and add them up (GE ``MoeDistributeCombineV2``). No gradient.

    Shapes, dtypes and limits are checked, also in graphs; rows are not exchanged yet.

    Args:
        expand_x: ``[A, H]`` bfloat16 or float16, what the experts made of dispatch's rows.
        expert_ids: ``[BS, K]`` int32, as given to dispatch.
        assist_info_for_combine: from dispatch.
        ep_send_counts: ``ep_recv_count`` of dispatch.
        expert_scales: ``[BS, K]`` float32 weights.
        group_ep: name of the communication group.
        ep_world_size: its ranks.
        ep_rank_id: this rank.
        moe_expert_num: routed experts of all ranks.
        **inputs_and_attrs: optional inputs and attributes of the op by their IR names, see
            ``python -m moe_graph ops MoeDistributeCombineV2``.

    Returns:
        ``[BS, H]``, the dtype of `expand_x`.

    Raises:
        OpError: a dtype, shape, attribute or size beyond the limits of the product.
        NotImplementedError: the op runs.
    """
    x: torch.Tensor = _ops.moe_distribute_combine_v2(
        expand_x,
        expert_ids,
        assist_info_for_combine,
        ep_send_counts,
        expert_scales,
        group_ep=group_ep,
        ep_world_size=ep_world_size,
        ep_rank_id=ep_rank_id,
        moe_expert_num=moe_expert_num,
        **inputs_and_attrs,
    )
    return x
