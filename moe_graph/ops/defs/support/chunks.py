"""How kernels cut their work: by shape alone, into parts that a core's L2 cache holds."""

from __future__ import annotations

CHUNK_BYTES = 1 << 18
"""fp32 data that is worked on at a time; a few buffers of this size fit a core's L2 cache."""


def row_chunks(rows: int, width: int) -> list[slice]:
    """Return slices that cover `rows` rows, each of about :data:`CHUNK_BYTES` in fp32."""
    return slices(rows, CHUNK_BYTES // (4 * max(width, 1)))


def tiles(rows: int, width: int) -> list[tuple[slice, slice]]:
    """Return (rows, columns) tiles of at most about :data:`CHUNK_BYTES` in fp32."""
    widest = CHUNK_BYTES // 4
    return [
        (chunk, columns)
        for columns in slices(width, widest)
        for chunk in row_chunks(rows, columns.stop - columns.start)
    ]


def slices(size: int, step: int) -> list[slice]:
    """Return slices of `step` that cover `size`, the last one shorter."""
    step = max(step, 1)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]
