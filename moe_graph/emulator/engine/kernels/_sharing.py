"""Matrix products in parts that are cut by shape and run side by side.

::

    [M, K] x [K, N]        rows or columns of the result, whichever are more
    [B, M, K] x [B, K, N]  matrices of the batch
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.chunks import slices
from moe_graph.ops.defs.support.workers import run_parts

#: Multiplications per part: some tenths of a millisecond.
_PART = 1 << 24
#: A part with fewer rows or columns spends its time on packing the other operand.
_NARROWEST = 128


def matmul(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """``torch.matmul`` whose bits do not depend on the number of threads."""
    if x1.dim() == 2 and x2.dim() == 2:
        return _two_dims(x1, x2)
    if x1.dim() > 2 and x2.dim() == 2:
        return _two_dims(x1.flatten(0, -2), x2).view(*x1.shape[:-1], x2.shape[1])
    if x1.dim() > 2 and x1.shape[:-2] == x2.shape[:-2]:
        return _batch(x1, x2)
    return torch.matmul(x1, x2)


def _two_dims(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    (rows, inner), columns = x1.shape, x2.shape[1]
    y = x1.new_empty((rows, columns))
    if rows >= columns:
        step = max(_PART // max(inner * columns, 1), _NARROWEST)
        run_parts(lambda part: torch.mm(x1[part], x2, out=y[part]), slices(rows, step))
    else:
        step = max(_PART // max(inner * rows, 1), _NARROWEST)
        run_parts(lambda part: torch.mm(x1, x2[:, part], out=y[:, part]), slices(columns, step))
    return y


def _batch(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    left, right = x1.flatten(0, -3), x2.flatten(0, -3)
    y = x1.new_empty((*left.shape[:2], right.shape[2]))
    step = _PART // max(left[0].numel() * right.shape[2], 1) if len(left) else 1
    run_parts(lambda part: torch.bmm(left[part], right[part], out=y[part]), slices(len(left), step))
    return y.view(*x1.shape[:-1], right.shape[2])
