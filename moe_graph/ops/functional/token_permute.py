"""Public functions that permute token copies and bring them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_graph.ops.defs.token_permute.gradient_of_tokens import gradient_of_tokens
from moe_graph.ops.defs.token_permute.row_gradients import has_all_rows, leading_rows
from moe_graph.ops.errors import OpError

__all__ = [
    "moe_token_permute",
    "moe_token_permute_grad",
    "moe_token_unpermute",
    "moe_token_unpermute_grad",
]

_ops = torch.ops.moe_graph


def moe_token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring the copies of tokens into the order of their indices (GE ``MoeTokenPermute``).

    Has a gradient. The sort is stable: copies of one index stay in the order of their tokens.

    Args:
        tokens: ``[T, H]`` (or more dimensions) bfloat16, float16, float32 or int8.
        indices: ``[T, K]`` or ``[T]`` (K = 1), int32 or int64, each in ``[0, 16777215)``; K is at
            most 512.
        num_out_tokens: rows to return: the first ``num_out_tokens`` when positive, all but the last
            ``-num_out_tokens`` when negative, all when 0 or None.
        padded_mode: False; no product has the other mode.

    Returns:
        ``permute_tokens`` ``[R, H]`` and ``sorted_indices`` ``[T * K]`` int32, the place of each
        copy in the order, also of those that are not returned.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    outputs: tuple[torch.Tensor, torch.Tensor]
    outputs = _ops.moe_token_permute(tokens, indices, num_out_tokens or 0, padded_mode)
    return outputs


def moe_token_permute_grad(
    permuted_output_grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    num_topk: int,
    padded_mode: bool = False,
) -> torch.Tensor:
    """Gradient of :func:`moe_token_permute` with respect to tokens (``MoeTokenPermuteGrad``).

    Args:
        permuted_output_grad: ``[R, H]`` bfloat16, float16 or float32; R may be less than
            ``T * K``.
        sorted_indices: ``[T * K]`` int32, as :func:`moe_token_permute` returned it.
        num_topk: K.
        padded_mode: False.

    Returns:
        ``[T, H]``, the dtype of `permuted_output_grad`; fp32 sums in the order of the product.
        Where R is less than ``T * K`` another op computes it, as GE would take ``R // K`` for T.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    if padded_mode:
        raise OpError("MoeTokenPermuteGrad", "padded_mode", got=True, want=False)
    if num_topk < 1:
        raise OpError("MoeTokenPermuteGrad", "num_topk", got=num_topk, want=">= 1")
    keeps_all = has_all_rows(permuted_output_grad, sorted_indices.shape[0])
    return gradient_of_tokens(permuted_output_grad, sorted_indices, num_topk, keeps_all=keeps_all)


def moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Bring permuted rows back to their tokens and add them up (GE ``MoeTokenUnpermute``).

    Has a gradient for rows and probs.

    Args:
        permuted_tokens: ``[R, H]`` bfloat16, float16 or float32; rows beyond R count as left out
            (not on Ascend 950, where R is ``T * K``).
        sorted_indices: ``[T * K]`` int32, as :func:`moe_token_permute` returned it.
        probs: ``[T, K]`` bfloat16, float16 or float32, K at most 512; None for K = 1 and weights
            of 1. A row whose prob is 0 is not read (Ascend 950: it is multiplied by 0).
        padded_mode: False; no product has the other mode.
        restore_shape: no effect without padded_mode.

    Returns:
        ``[T, H]``, the dtype of `permuted_tokens`; fp32 sums in the order of the product.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    output: torch.Tensor = _ops.moe_token_unpermute(
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape or []
    )
    return output


def moe_token_unpermute_grad(
    permuted_tokens: torch.Tensor,
    unpermuted_tokens_grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`moe_token_unpermute` (GE ``MoeTokenUnpermuteGrad``).

    Args:
        permuted_tokens: ``[R, H]``, as in the forward.
        unpermuted_tokens_grad: ``[T, H]``, the dtype of `permuted_tokens`.
        sorted_indices: ``[T * K]`` int32, each index once.
        probs: ``[T, K]``, as in the forward.
        padded_mode: False.
        restore_shape: no effect without padded_mode.

    Returns:
        The gradients of `permuted_tokens` ``[R, H]`` and of `probs` ``[T, K]`` (``[0]`` without
        probs), each in the dtype of its tensor, from fp32 products and sums over H.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    rows_grad, probs_grad = _ops.moe_token_unpermute_grad(
        permuted_tokens,
        unpermuted_tokens_grad,
        sorted_indices,
        probs,
        padded_mode,
        restore_shape or [1, 1],
    )
    return leading_rows(rows_grad, permuted_tokens.shape[0]), probs_grad
