"""Public functions for the products and activations of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["grouped_matmul", "swiglu"]

_ops = torch.ops.moe_graph


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
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
            ``group_type=2``. Also a list of G matrices, for ``group_type=0``.
        bias: ``[G, N]``, or a list of G of ``[N]`` beside a list of weights; float16 beside
            float16, else float32. Not for ``group_type=2``.
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
    if not isinstance(weight, torch.Tensor):
        (joined,) = _ops.grouped_matmul(
            [x],
            list(weight),
            [bias] if isinstance(bias, torch.Tensor) else list(bias or ()),
            [],
            [],
            [],
            [],
            group_list,
            split_item=3,
            transpose_weight=transpose_weight,
            transpose_x=transpose_x,
            group_type=group_type,
            group_list_type=group_list_type,
        )
        return joined
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
