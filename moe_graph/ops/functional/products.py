"""Public functions for the products and activations of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_graph.ops.defs.products.grouped_matmul_dtypes import OUTPUT_DTYPES
from moe_graph.ops.errors import OpError

__all__ = ["grouped_matmul", "swiglu"]

_ops = torch.ops.moe_graph


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    group_list: torch.Tensor,
    scale: torch.Tensor | None = None,
    per_token_scale: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    transpose_weight: bool = False,
    transpose_x: bool = False,
    group_type: int = 0,
    group_list_type: int = 0,
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix (GE ``GroupedMatmul``).

    Has a gradient, but not for int8 rows and weights, which are multiplied exactly and scaled.

    Args:
        x: ``[R, K]`` float16, bfloat16, float32 or int8, rows sorted by group.
        weight: ``[G, K, N]``, or ``[G, N, K]`` with `transpose_weight`; ``[R, N]`` for
            ``group_type=2``. Also a list of G matrices, for ``group_type=0``.
        bias: ``[G, N]``, or a list of G of ``[N]`` beside a list of weights; float16 beside
            float16, int32 (or bfloat16) beside int8, else float32. Not for ``group_type=2``.
        group_list: ``[G]`` int64, running sum of the group sizes or the sizes; ``[G, 2]`` of index
            and size with ``group_list_type=2``, for int8.
        scale: ``[G, N]`` float32 or bfloat16, for int8.
        per_token_scale: ``[R]`` float32, for int8.
        output_dtype: for int8: float16 beside a float32 scale, bfloat16 beside a bfloat16 one, or
            int32 without scale. None is float16.
        transpose_weight: weights are stored ``[N, K]``.
        transpose_x: True exactly for ``group_type=2``.
        group_type: 0 groups the rows; 2 the inner dimension, ``x.T @ weight`` per group.
        group_list_type: 0 running sum, 1 sizes, 2 pairs of index and size.

    Returns:
        ``[R, N]``, rows beyond the last group unwritten (NaN here); ``[G, K, N]`` for
        ``group_type=2``.

    Raises:
        OpError: a dtype, shape, attribute or group list that the op does not take.
    """
    quantised = x.dtype is torch.int8 or scale is not None or per_token_scale is not None
    if not quantised and output_dtype not in (None, x.dtype):
        raise OpError("GroupedMatmul", "dtype", got=output_dtype, want=f"{x.dtype}, that of x")
    if quantised or not isinstance(weight, torch.Tensor):
        (joined,) = _ops.grouped_matmul(
            [x],
            [weight] if isinstance(weight, torch.Tensor) else list(weight),
            [bias] if isinstance(bias, torch.Tensor) else list(bias or ()),
            [] if scale is None else [scale],
            [],
            [],
            [],
            group_list,
            per_token_scale,
            split_item=3,
            dtype=_number_of(output_dtype),
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


def _number_of(output_dtype: torch.dtype | None) -> int:
    """Return the attribute ``dtype`` of this dtype of y; what has none is left to the op."""
    numbers = {dtype: number for number, dtype in OUTPUT_DTYPES.items()}
    return 0 if output_dtype is None else numbers.get(output_dtype, max(OUTPUT_DTYPES) + 1)


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
