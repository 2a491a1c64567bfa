"""Copying rows of a table, in parts that several threads share."""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts

_LARGER_PARTS = 16
"""How much larger than a cache the parts of a plain copy are, as each part costs a call."""


def gather_rows(table: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``table[source[i]]`` to ``out[i]`` and return `out`.

    Args:
        table: ``[T, H]``.
        source: ``[R]`` int32 or int64.
        out: ``[R, H]`` contiguous, of the dtype of `table`.
    """
    width = table.shape[1]

    def gather(chunk: slice) -> None:
        torch.index_select(table, 0, source[chunk], out=out[chunk])

    run_parts(gather, row_chunks(source.shape[0], width // _LARGER_PARTS))
    return out
