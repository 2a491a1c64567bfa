"""Which scores are the largest: the one order of all routers.

Scores descend and equal ones keep the order of their experts. ``-0.0`` equals ``+0.0``; NaN is
above all numbers, as in ``torch.topk``.
"""

from __future__ import annotations

import torch

_MAGNITUDE = 0x7FFFFFFF


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return int64 ``[n, k]``, the indices of the k largest of ``[n, E]`` fp32, in order."""
    experts = scores.shape[-1]
    # The order of floats as that of integers, with the expert below it: no two keys are equal, so
    # that a selection which is not stable has only one answer.
    bits = (scores + 0.0).view(torch.int32)
    rank = bits ^ ((bits >> 31) & _MAGNITUDE)
    rank.masked_fill_(scores.isnan(), _MAGNITUDE)
    keys = rank.to(torch.int64) << 32
    keys += torch.arange(experts - 1, -1, -1, device=scores.device)
    return keys.topk(k, dim=-1).indices


def ranked(scores: list[float]) -> list[int]:
    """Return all indices in the order of :func:`top_indices`, by its definition."""
    return sorted(
        range(len(scores)),
        key=lambda expert: (0, 0.0) if scores[expert] != scores[expert] else (1, -scores[expert]),
    )
