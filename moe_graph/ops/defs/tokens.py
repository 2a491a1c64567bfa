"""How kernels walk over tokens."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_BYTES = 1 << 18
"""fp32 rows that are worked on at a time; a few buffers of this size fit a core's L2 cache."""


def token_chunks(tokens: int, hidden: int) -> Iterator[slice]:
    """Yield slices that cover `tokens`, each of about :data:`CHUNK_BYTES` in fp32."""
    step = max(1, CHUNK_BYTES // (4 * max(hidden, 1)))
    for begin in range(0, tokens, step):
        yield slice(begin, min(begin + step, tokens))
