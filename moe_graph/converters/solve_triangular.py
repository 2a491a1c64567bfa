"""Triangular systems as matrix products: chunks of linear attention (gated delta rule) solve them.

TorchAir has no converter for ``linalg_solve_triangular``. The inverse of a triangular matrix comes
from those of its diagonal blocks, twice as large in each of log2(n) steps::

    [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]

All blocks of a step are one batched product. Nothing is added that substitution would not add, so
the error grows as that of substitution does, unlike with the series of a nilpotent matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """Return x with ``a @ x = b``, or ``x @ a = b`` where `left` is false.

    Args:
        a: [..., n, n]; the other triangle is not read, nor the diagonal if `unitriangular`.
        b: [..., n, k] ([..., k, n] where `left` is false); batch dimensions broadcast.
        upper: `a` is upper triangular.
        left: side on which `a` stands.
        unitriangular: the diagonal counts as ones.

    Returns:
        [..., n, k] ([..., k, n]), or NotImplemented where n is symbolic.
    """
    n = a.shape[-1]
    if not isinstance(n, int):
        return NotImplemented
    # The transpose of an upper triangular matrix is a lower triangular one.
    inverse = _inverse(a.mT, unitriangular).mT if upper else _inverse(a, unitriangular)
    return inverse @ b if left else b @ inverse


def _inverse(a: Tensor, unitriangular: bool) -> Tensor:
    """Inverse of a lower triangular matrix [..., n, n]."""
    n, batch = a.shape[-1], a.shape[:-2]
    size = 1 << max(n - 1, 0).bit_length()
    if size > n:
        a = torch.nn.functional.pad(a, (0, size - n, 0, size - n))
    rows = torch.arange(size, device=a.device)
    diagonal = rows.unsqueeze(1) == rows
    if unitriangular:
        blocks = torch.ones_like(a[..., :, :1])
    else:
        entries = torch.where(diagonal, a, 0.0).sum(-1, keepdim=True)
        blocks = 1.0 / torch.where(rows.unsqueeze(1) < n, entries, 1.0)
    blocks = blocks.unsqueeze(-1)  # [..., size, 1, 1]: inverses of blocks of one row

    width = 1
    while width < size:
        pairs = size // (2 * width)
        below = _below_diagonal(a, pairs, width)
        halves = blocks.reshape([*batch, pairs, 2, width, width])
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([top, torch.cat([corner, second], -1)], -2)
        width *= 2
    return blocks.reshape([*batch, size, size])[..., :n, :n]


def _below_diagonal(a: Tensor, pairs: int, width: int) -> Tensor:
    """Lower left quarters [..., pairs, width, width] of the diagonal blocks of two widths."""
    grid = a.reshape([*a.shape[:-2], pairs, 2 * width, pairs, 2 * width])
    quarters = grid[..., :, width:, :, :width]
    return torch.stack([quarters[..., k, :, k, :] for k in range(pairs)], -3)
