"""Memory that the device leaves unwritten, filled so that a read of it shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SENTINEL_BYTE = 0xA5
"""Every byte of an integer that is unwritten: no index, count or id looks like it."""


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new tensor of NaN, or of the sentinel for integers; True for bool."""
    return poison_(torch.empty(list(shape), dtype=dtype, device=device))


def poison_(memory: torch.Tensor) -> torch.Tensor:
    """Fill contiguous `memory` with NaN, the sentinel of integers or True, and return it."""
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        return memory.fill_(float("nan"))
    if memory.dtype == torch.bool:
        return memory.fill_(True)
    memory.view(-1).view(torch.uint8).fill_(SENTINEL_BYTE)
    return memory
