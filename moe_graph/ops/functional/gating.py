"""Public functions of routers."""

from __future__ import annotations

import torch

__all__ = ["moe_gating_top_k", "moe_gating_top_k_softmax"]

_ops = torch.ops.moe_graph


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route by scores, bias and groups (GE ``MoeGatingTopK``). Has a gradient for x.

    Args:
        x: logits ``[T, E]``; float16, bfloat16, float32; E at most 2048.
        k: K.
        bias: ``[E]``, the dtype of `x`; added for the selection only.
        input_ids: ``[T]`` token ids, for the hash mode.
        tid2eid: ``[vocabulary, K]`` experts of each token id, which replace the selection.
        k_group: groups that take part.
        group_count: groups of equal size.
        group_select_mode: score of a group: 0 its largest, 1 the sum of its two largest.
        renorm: 1 divides the weights by their sum.
        norm_type: scores: 0 softmax, 1 sigmoid, 2 square root of softplus (Ascend 950). 1 and 2
            always divide.
        out_flag: return all scores.
        routed_scaling_factor: multiplies the weights.
        eps: added to the sum that divides.

    Returns:
        ``y`` ``[T, K]``, the dtype of `x`; ``expert_idx`` ``[T, K]`` int32; ``out`` ``[T, E]``
        float32, all scores, unwritten (NaN here) without `out_flag`.

    Raises:
        OpError: a dtype, shape, attribute or id that the op does not take.
    """
    selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _ops.moe_gating_top_k(
        x,
        bias,
        input_ids,
        tid2eid,
        k,
        k_group,
        group_count,
        group_select_mode,
        renorm,
        norm_type,
        out_flag,
        routed_scaling_factor,
        eps,
    )
    return selection


def moe_gating_top_k_softmax(
    x: torch.Tensor,
    finished: torch.Tensor | None = None,
    k: int = 1,
    *,
    renorm: int | None = None,
    output_softmax_result_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route by softmax and top-k (GE ``MoeGatingTopKSoftmax`` or its V2). Has a gradient.

    The softmax is taken in fp32. Of equal scores the lower expert comes first.

    Args:
        x: logits ``[T, E]`` or ``[B, S, E]``; float16, bfloat16, float32.
        finished: bool, one per row; such rows get expert id E. No gradient then.
        k: K, at most 1024 and E.
        renorm: None or 0: softmax, then top-k; 1: top-k, then softmax of the K values. An integer
            asks for V2.
        output_softmax_result_flag: return the softmax of all logits (renorm 0; asks for V2).

    Returns:
        ``y`` ``[..., K]``, the dtype of `x`; ``expert_idx`` ``[..., K]`` int32; and ``row_idx``
        ``[..., K]`` int32, the k-major number of each copy, or with V2 ``softmax_result``, float32
        of the shape of `x`, empty unless asked for.

    Raises:
        OpError: a dtype, shape or attribute that the op does not take.
        NotImplementedError: in the backward pass, with `finished`.
    """
    selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if renorm is None and not output_softmax_result_flag:
        selection = _ops.moe_gating_top_k_softmax(x, finished, k)
    else:
        selection = _ops.moe_gating_top_k_softmax_v2(
            x, finished, k, renorm or 0, output_softmax_result_flag
        )
    return selection
