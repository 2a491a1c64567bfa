"""torch_npu's MoE operators in terms of the ops of this project.

    torch.ops.npu.npu_moe_token_permute(tokens, indices)
becomes
    torch.ops.moe_graph.moe_token_permute(tokens, indices, 0, False)

One function per operator, with its schema's arguments. The backend decomposes graphs by them, and
they are the kernels of the emulated device. TorchAir converts none of torch_npu's gradients, none
of the token permutations, and fails on two of the operators that it does convert
(``npu_moe_init_routing_v2``, which is MoeInitRoutingV3, and ``npu_moe_gating_top_k_softmax_v2``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_graph.ops.errors import OpError
from moe_graph.ops.functional.experts import moe_update_expert
from moe_graph.ops.functional.gating import moe_gating_top_k, moe_gating_top_k_softmax
from moe_graph.ops.functional.routing_map import (
    moe_token_permute_with_routing_map,
    moe_token_permute_with_routing_map_grad,
    moe_token_unpermute_with_routing_map,
    moe_token_unpermute_with_routing_map_grad,
)
from moe_graph.ops.functional.token_permute import (
    moe_token_permute,
    moe_token_permute_grad,
    moe_token_unpermute,
    moe_token_unpermute_grad,
)

_ops = torch.ops.moe_graph


def _init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Any:
    return _ops.moe_init_routing(x, row_idx, expert_idx, active_num)


def _init_routing_quant(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> Any:
    return _ops.moe_init_routing_quant_v2(
        x,
        expert_idx,
        scale,
        offset,
        active_num,
        expert_capacity,
        expert_num,
        drop_pad_mode,
        expert_tokens_num_mode,
        expert_tokens_before_capacity_flag,
        quant_mode,
    )


def _init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> Any:
    if x_dtype is not None:
        raise OpError("MoeInitRoutingV3", "x_dtype", got=x_dtype, want="None")
    return _ops.moe_init_routing_v3(
        x,
        expert_idx,
        scale,
        offset,
        active_num,
        expert_capacity,
        expert_num,
        drop_pad_mode,
        expert_tokens_num_type,
        expert_tokens_num_flag,
        quant_mode,
        list(active_expert_range),
        row_idx_type,
    )


def _finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    row_idx: Tensor,
    expert_idx: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Any:
    return _ops.moe_finalize_routing_v2(
        rows,
        row_idx,
        skip1,
        skip2,
        bias,
        scales,
        expert_idx,
        drop_pad_mode=drop_pad_mode or 0,
        k=1 if k is None else k,
    )


def _gating_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> Any:
    return _ops.moe_gating_top_k_softmax_v2(x, finished, k, renorm or 0, bool(output_softmax))


def _gating_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,  # noqa: N803  the name in the schema
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Any:
    return _ops.moe_gating_top_k_backward(
        x_norm, grad_y, expertIdx, renorm, norm_type, routed_scaling_factor, eps
    )


def _re_routing(
    tokens: Tensor,
    counts: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> Any:
    if tokens_dtype is not None:
        raise OpError("MoeReRouting", "tokens_dtype", got=tokens_dtype, want="None")
    return _ops.moe_re_routing(tokens, counts, per_token_scales, expert_token_num_type, idx_type)


def _token_permute_grad(
    tokens: Tensor,
    grad: Tensor,
    indices: Tensor,
    sorted_indices: Tensor,
    padded_mode: bool = False,
) -> Tensor:
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    return moe_token_permute_grad(grad, sorted_indices, int(top_k), padded_mode)


def _token_permute_grad_v2(
    grad: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803  the name in the schema
    padded_mode: bool = False,
) -> Tensor:
    return moe_token_permute_grad(grad, sorted_indices, int(num_topK), padded_mode)


def _token_unpermute_and_keep(
    rows: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The second output is what the gradient of the probs reads."""
    kept = rows if probs is not None else rows.new_empty((0,))
    return moe_token_unpermute(rows, sorted_indices, probs, padded_mode, restore_shape), kept


def _token_unpermute_grad_v2(
    grad: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> Any:
    if probs is None or permuted_tokens is None:
        # Without probs nothing reads the rows; their number and dtype are all that counts.
        permuted_tokens = grad.new_empty(
            (permuted_tokens_size_0, grad.shape[1]), dtype=permuted_tokens_dtype
        )
    return moe_token_unpermute_grad(
        permuted_tokens, grad, sorted_indices, probs, padded_mode, restore_shape
    )


def _unpermute_with_map_and_keep(
    rows: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Any:
    sizes = () if probs is not None else tuple(restore_shape)
    return _ops.moe_token_unpermute_with_routing_map(
        rows, sorted_indices, routing_map, probs, drop_and_pad, sizes
    )


FORMS: dict[str, Callable[..., Any]] = {
    "_npu_moe_token_unpermute": _token_unpermute_and_keep,
    "_npu_moe_token_unpermute_with_routing_map": _unpermute_with_map_and_keep,
    "npu_moe_compute_expert_tokens": _ops.moe_compute_expert_tokens,
    "npu_moe_finalize_routing": _finalize_routing,
    "npu_moe_gating_top_k": moe_gating_top_k,
    "npu_moe_gating_top_k_backward": _gating_backward,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_moe_gating_top_k_softmax_v2": _gating_softmax_v2,
    "npu_moe_init_routing": _init_routing,
    "npu_moe_init_routing_quant": _init_routing_quant,
    "npu_moe_init_routing_v2": _init_routing_v2,
    "npu_moe_re_routing": _re_routing,
    "npu_moe_token_permute": moe_token_permute,
    "npu_moe_token_permute_grad": _token_permute_grad,
    "npu_moe_token_permute_grad_v2": _token_permute_grad_v2,
    "npu_moe_token_permute_with_routing_map": moe_token_permute_with_routing_map,
    "npu_moe_token_permute_with_routing_map_grad": moe_token_permute_with_routing_map_grad,
    "npu_moe_token_unpermute": moe_token_unpermute,
    "npu_moe_token_unpermute_grad": moe_token_unpermute_grad,
    "npu_moe_token_unpermute_grad_v2": _token_unpermute_grad_v2,
    "npu_moe_token_unpermute_with_routing_map": moe_token_unpermute_with_routing_map,
    "npu_moe_token_unpermute_with_routing_map_grad": moe_token_unpermute_with_routing_map_grad,
    "npu_moe_update_expert": moe_update_expert,
}
"""Operator name in ``torch.ops.npu`` -> the same in ops of this project."""
