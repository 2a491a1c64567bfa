"""The part of the sorted rows that this rank holds, as the ops WithEp take it in ``range``.

``range = (start, end)`` are places in the sort of all copies: row 0 is the one of place ``start``.
``(0, 0)`` and ``(-1, -1)``, the defaults of the IRs, stand for no range: all places.
"""

from __future__ import annotations

from moe_graph.ops.dims import Dim, known_less
from moe_graph.ops.opdef import Call

NO_RANGES = ((0, 0), (-1, -1))


def has_range(op: Call) -> bool:
    """Tell whether the call names a range."""
    return op.range not in NO_RANGES


def expect_pair(op: Call) -> tuple[int, int]:
    """Return ``range``.

    Raises:
        OpError: it is not two numbers.
    """
    if len(op.range) != 2:
        raise op.error("range", got=op.range, want="(start, end)")
    start, end = op.range
    return start, end


def check_ep_range(op: Call, copies: Dim) -> None:
    """Raise unless the range is none or is one of the `copies` places.

    Raises:
        OpError: it is not.
    """
    start, end = expect_pair(op)
    if not has_range(op):
        return
    if not 0 <= start < end:
        raise op.error("range", got=op.range, want="0 <= start < end, or (0, 0)")
    if known_less(copies, end):
        raise op.error("range", got=op.range, want=f"end <= {copies}, the copies")


def check_rows(op: Call, argument: str, rows: Dim) -> None:
    """Raise when `rows`, those of `argument`, are known to be fewer than the range has.

    Raises:
        OpError: they are.
    """
    start, end = op.range
    if has_range(op) and known_less(rows, end - start):
        raise op.error(argument, got=f"{rows} rows", want=f"{end - start}, those of range")


def window_of(op: Call, rows: int) -> tuple[int, int]:
    """Return the places that have a row: those of the range, without one the first `rows`."""
    return op.range if has_range(op) else (0, rows)
