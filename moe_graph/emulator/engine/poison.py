"""Fresh memory that shows itself when it is read before it is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Poison of integer tensors: every byte is 0xA5, which no index, count or id looks like.
_SENTINEL_BYTE = 0xA5


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of NaN, or of the sentinel for integers; True for bool."""
    result = torch.empty(list(shape), dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return result.fill_(float("nan"))
    if dtype == torch.bool:
        return result.fill_(True)
    result.view(-1).view(torch.uint8).fill_(_SENTINEL_BYTE)
    return result
