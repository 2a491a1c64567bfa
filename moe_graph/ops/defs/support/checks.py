"""Checks of values, which kernels make before they use them as indices."""

from __future__ import annotations

import torch

from moe_graph.ops.opdef import Call


def check_range(
    op: Call, argument: str, values: torch.Tensor, low: int, end: int, meaning: str
) -> None:
    """Raise unless all `values`, those of `argument`, are in ``[low, end)``.

    Raises:
        OpError: one is not; `meaning` says what the range is.
    """
    if values.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(values))
    if smallest < low or largest >= end:
        raise op.error(
            argument,
            got=f"values from {smallest} to {largest}",
            want=f"values in [{low}, {end}), {meaning}",
        )
