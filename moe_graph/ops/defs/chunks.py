"""How kernels walk over rows."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_BYTES = 1 << 19
"""fp32 rows that are worked on at a time; a few buffers of this size fit a core's L2 cache."""


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that cover `rows` rows, each of about :data:`CHUNK_BYTES` in fp32."""
    step = max(1, CHUNK_BYTES // (4 * max(width, 1)))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
