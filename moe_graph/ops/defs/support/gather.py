"""Copying rows of a table, in parts that several threads share."""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.chunks import CHUNK_BYTES, slices
from moe_graph.ops.defs.support.workers import run_parts

_PARTS = 8
"""Into how many parts a large copy is cut: few, as each costs a call, but more than threads."""


def gather_rows(table: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``table[source[i]]`` to ``out[i]`` and return `out`.

    Args:
        table: ``[T, H]``.
        source: ``[R]`` int32 or int64.
        out: ``[R, H]`` contiguous, of the dtype of `table`.
    """
    rows = source.shape[0]
    smallest = CHUNK_BYTES // max(table.shape[1] * table.element_size(), 1)

    def gather(part: slice) -> None:
        torch.index_select(table, 0, source[part], out=out[part])

    run_parts(gather, slices(rows, max(-(-rows // _PARTS), smallest)))
    return out
