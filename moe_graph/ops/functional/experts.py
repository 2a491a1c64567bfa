"""Public functions on expert ids, counts and rows."""

from __future__ import annotations

import torch

__all__ = ["moe_compute_expert_tokens", "moe_re_routing", "moe_update_expert"]

_ops = torch.ops.moe_graph


def moe_compute_expert_tokens(sorted_experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count rows per expert, as running sums (GE ``MoeComputeExpertTokens``). No gradient.

    Args:
        sorted_experts: ``[R]`` int32, ascending expert ids.
        num_experts: E, at most 2048.

    Returns:
        ``[E]`` int32: how many ids are ``<= e``.

    Raises:
        OpError: a dtype, shape or attribute that the op does not take, or ids out of order.
    """
    ends: torch.Tensor = _ops.moe_compute_expert_tokens(sorted_experts, num_experts)
    return ends


def moe_re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    per_token_scales: torch.Tensor | None = None,
    *,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring rows from the order of ranks to that of experts (GE ``MoeReRouting``). No gradient.

    Args:
        tokens: ``[A, H]``, by rank and then by expert; float16, bfloat16, int8, on Ascend 950 also
            float8 and float4.
        expert_token_num_per_rank: ``[ranks, E]`` int32 or int64; the sum is at most A.
        per_token_scales: ``[A]`` or ``[A, ...]``, permuted alike; float32, on Ascend 950 also
            float8_e8m0fnu.
        expert_token_num_type: 1, counts.
        idx_type: 0: where each row of the result was; 1 (Ascend 950): where each row went.

    Returns:
        ``permute_tokens`` ``[A, H]``, ``permute_per_token_scales`` (``[A]``, unwritten, without
        scales), ``permute_token_idx`` ``[A]`` int32, and ``expert_token_num`` ``[E]``, the dtype
        of the counts. Rows beyond the sum of the counts are unwritten.

    Raises:
        OpError: a dtype, shape, attribute or count that the op does not take.
    """
    permuted: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _ops.moe_re_routing(
        tokens, expert_token_num_per_rank, per_token_scales, expert_token_num_type, idx_type
    )
    return permuted


def moe_update_expert(
    expert_ids: torch.Tensor,
    eplb_table: torch.Tensor,
    *,
    expert_scales: torch.Tensor | None = None,
    pruning_threshold: torch.Tensor | None = None,
    active_mask: torch.Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose instances of experts and prune routes (GE ``MoeUpdateExpert``, A3 and Ascend 950).

    Args:
        expert_ids: ``[T, K]`` int32 or int64.
        eplb_table: ``[E, F]`` int32: the number n of instances of an expert, then the n of them.
        expert_scales: ``[T, K]`` weights; float16, bfloat16, float32; with `pruning_threshold`.
        pruning_threshold: ``[K]`` or ``[1, K]`` float32, relative to the sum of a token's weights.
        active_mask: ``[T]`` bool, False for tokens that take no part; needs `expert_scales`.
        local_rank_id: this rank, for balance_mode 0.
        world_size: number of ranks, for balance_mode 0.
        balance_mode: instance by rank (0) or by token (1).

    Returns:
        ``balanced_expert_ids`` ``[T, K]``, the dtype of `expert_ids`, and ``balanced_active_mask``
        ``[T, K]`` bool, unwritten without `expert_scales`.

    Raises:
        OpError: a product, dtype, shape, attribute, id or table that the op does not take.
    """
    balanced: tuple[torch.Tensor, torch.Tensor] = _ops.moe_update_expert(
        expert_ids,
        eplb_table,
        expert_scales,
        pruning_threshold,
        active_mask,
        local_rank_id,
        world_size,
        balance_mode,
    )
    return balanced
