"""How kernels walk over rows."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_BYTES = 1 << 19
"""fp32 rows that are worked on at a time; a few buffers of this size fit a core's L2 cache."""

SERIAL_ELEMENTS = 32768 - 1
"""PyTorch works on this many elements in one thread."""


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that cover `rows` rows, each of about :data:`CHUNK_BYTES` in fp32."""
    return _slices(rows, CHUNK_BYTES // (4 * max(width, 1)))


def serial_tiles(rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) tiles that PyTorch does not split among threads.

    ATen computes ``exp`` with vector code and the odd elements at the end of each thread's share
    with scalar code, which differ in the last bit: where a share ends must not depend on the number
    of threads.
    """
    for columns in _slices(width, SERIAL_ELEMENTS):
        for chunk in _slices(rows, SERIAL_ELEMENTS // max(columns.stop - columns.start, 1)):
            yield chunk, columns


def _slices(size: int, step: int) -> Iterator[slice]:
    step = max(step, 1)
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))
