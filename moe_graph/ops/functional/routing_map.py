"""Public functions that permute by a routing map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_graph.ops.dims import may_equal
from moe_graph.ops.errors import OpError

__all__ = [
    "moe_token_permute_with_routing_map",
    "moe_token_permute_with_routing_map_grad",
    "moe_token_unpermute_with_routing_map",
    "moe_token_unpermute_with_routing_map_grad",
]

_ops = torch.ops.moe_graph


def moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Copy token rows into expert order (``torch_npu.npu_moe_token_permute_with_routing_map``).

    Has a gradient for `tokens` and `probs`. With ``n = num_out_tokens``, ``topK = n // T`` and
    ``capacity = n // E``:

    Args:
        tokens: ``[T, H]`` float16, bfloat16 or float32.
        routing_map: ``[T, E]`` bool, or int8 of 0 and 1; at most topK experts per token.
        probs: ``[T, E]``, the dtype of `tokens`, or float32 beside bfloat16.
        num_out_tokens: n, at most ``T * E``; None stands for T.
        drop_and_pad: give every expert `capacity` rows: its first tokens, filled up with others.

    Returns:
        ``permuted_tokens`` ``[R, H]``, ``permuted_probs`` ``[R]`` (None without probs) and
        ``sorted_indices`` ``[R]`` int32, with ``R = topK * T``, or ``capacity * E`` with
        `drop_and_pad`. ``sorted_indices`` has the row of slot ``t * topK + j``, -1 for an unused
        one; with `drop_and_pad` the token of each row. Rows of no slot are unwritten: NaN here.

    Raises:
        OpError: a dtype, shape, attribute or map that the op does not take.
    """
    permuted, permuted_probs, sorted_indices = _ops.moe_token_permute_with_routing_map(
        tokens,
        routing_map.t() if routing_map.dim() == 2 else routing_map,
        probs.t() if probs is not None and probs.dim() == 2 else probs,
        tokens.shape[0] if num_out_tokens is None else num_out_tokens,
        drop_and_pad,
    )
    return permuted, None if probs is None else permuted_probs, sorted_indices


def moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor | None,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of :func:`moe_token_permute_with_routing_map`.

    Args:
        permuted_token_out_grad: ``[R, H]``.
        probs_grad: ``[R]`` gradient of the permuted probs, or None.
        sorted_indices: ``[R]`` int32, as the forward returned it.
        routing_map: ``[T, E]``; needed with `probs_grad` unless `drop_and_pad`.
        experts_num: E.
        tokens_num: T.
        drop_and_pad: that of the forward.

    Returns:
        The gradients of the tokens ``[T, H]`` and of the probs ``[T, E]`` (None without
        `probs_grad`); fp32 sums in the order of the slots or rows.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    of_tokens, of_probs = _ops.moe_token_permute_with_routing_map_grad(
        permuted_token_out_grad,
        probs_grad,
        sorted_indices,
        routing_map,
        experts_num,
        tokens_num,
        drop_and_pad,
    )
    return of_tokens, None if probs_grad is None else of_probs


def moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """Add the rows of each token up (``torch_npu.npu_moe_token_unpermute_with_routing_map``).

    Has a gradient for `permuted_tokens` and `probs`.

    Args:
        permuted_tokens: ``[R, H]`` float16, bfloat16 or float32.
        sorted_indices: ``[R]`` int32, as :func:`moe_token_permute_with_routing_map` returned it.
        restore_shape: ``[T, H]``; without `probs` it is a constant of a graph.
        probs: ``[T, E]`` weights, the dtype of `permuted_tokens`, or float32 beside bfloat16.
        routing_map: ``[T, E]`` bool or int8; needed with `probs` unless `drop_and_pad`.
        drop_and_pad: that of the permutation.

    Returns:
        ``[T, H]``, the dtype of `permuted_tokens`; fp32 sums in the order of the slots or rows.

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    sizes = tuple(restore_shape)
    if probs is not None and probs.dim() == 2 and permuted_tokens.dim() == 2 and sizes:
        # The op reads T off the probs: a shape of symbols cannot be an attribute.
        _check_restore_shape(sizes, (probs.shape[0], permuted_tokens.shape[1]))
        sizes = ()
    unpermuted: torch.Tensor = _ops.moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, routing_map, probs, drop_and_pad, sizes
    )[0]
    return unpermuted


def _check_restore_shape(got: tuple[int, ...], want: tuple[int, int]) -> None:
    if len(got) != 2 or not all(map(may_equal, got, want)):
        raise OpError("MoeTokenUnpermuteWithRoutingMap", "restore_shape", got=got, want=want)


def moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of :func:`moe_token_unpermute_with_routing_map`.

    Args:
        unpermuted_tokens_grad: ``[T, H]``.
        out_index: ``[R]`` int32: the ``sorted_indices`` of the forward, or with `drop_and_pad` the
            rows ordered by token.
        permuted_token_id: ``[R]`` int32, the tokens of those rows; read with `drop_and_pad` only.
        routing_map: ``[T, E]``; needed with `probs`.
        permuted_tokens: ``[R, H]``; needed with `probs`.
        probs: ``[T, E]``, or None.
        drop_and_pad: that of the forward.
        restore_shape: not read.

    Returns:
        The gradients of the permuted tokens ``[R, H]`` (NaN in rows of no token, which are
        unwritten) and of the probs ``[T, E]`` (None without probs).

    Raises:
        OpError: a dtype, shape, attribute or index that the op does not take.
    """
    of_tokens, of_probs = _ops.moe_token_unpermute_with_routing_map_grad(
        unpermuted_tokens_grad,
        out_index,
        permuted_token_id,
        routing_map,
        permuted_tokens,
        probs,
        drop_and_pad,
        tuple(restore_shape),
    )
    return of_tokens, None if probs is None else of_probs
