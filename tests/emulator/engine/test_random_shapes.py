"""Random ranks, sizes (0 and 1 among them), axes and broadcasts, through TorchAir."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from through_torchair import check
from torch import Tensor


def draw(seed: int) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """Return a function and its arguments: x, something that broadcasts with x, an index."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.randint(1, 4)
    shape = [rng.choice([0, 1, 2, 3, 5]) if seed % 4 == 0 else rng.randint(1, 5)] + [
        rng.randint(1, 5) for _ in range(rank - 1)
    ]
    partner = [size if rng.random() < 0.6 else 1 for size in shape][rng.randint(0, rank - 1) :]
    axis = rng.randrange(-rank, rank)
    order = rng.sample(range(rank), rank)
    start, step = rng.randint(0, 2), rng.randint(1, 2)
    rows = torch.randint(0, max(shape[axis], 1), (4 if shape[axis] else 0,))

    def function(x: Tensor, y: Tensor, i: Tensor) -> list[Tensor]:
        slices = [slice(None)] * (axis % rank) + [slice(start, None, step)]
        return [
            x + y, x * y, x > y, torch.where(x > y, x, y), x / (y.abs() + 1),
            x.sum(axis), x.mean(axis, keepdim=True), x.softmax(axis), x.cumsum(axis),
            x.permute(order), x.permute(order).reshape(-1), x.unsqueeze(axis), x.flatten(),
            torch.cat([x, x], axis), torch.stack([x, x], 0), x[tuple(slices)],
            x.expand(2, *x.shape),
            x.index_select(axis, i), x.flip(axis), y.expand_as(x) if y.dim() == rank else y.clone(),
        ]  # fmt: skip

    return function, (torch.randn(shape), torch.randn(partner), rows)


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes(seed: int) -> None:
    function, args = draw(seed)
    check(function, args)
