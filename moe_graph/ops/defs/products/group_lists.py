"""How a product is grouped: the axis, and the groups along it.

``group_list`` has two readings, which must not be confused: ends of groups, or their sizes. An
int64 list says nothing of which one it is, so a list that only fits the other reading is an error
that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from moe_graph.ops.opdef import Call

UNGROUPED, ROWS, INNER = -1, 0, 2  # group_type
CUMSUM, COUNT, SPARSE = 0, 1, 2  # group_list_type


def group_ends(op: Call, rows: int) -> list[int]:
    """Return where each group of ``op.group_list`` ends, within `rows`.

    Raises:
        OpError: a group of negative size, or groups of more than `rows`.
    """
    sizes = op.group_list[:, 1] if op.group_list_type == SPARSE else op.group_list
    values: list[int] = sizes.tolist()
    ends = _ends(values, op.group_list_type)
    for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end < begin:
            wanted = ">= 0" if op.group_list_type != CUMSUM else f">= {begin}, the value before"
            raise op.error(
                "group_list",
                got=f"{values[group]} at {group}",
                want=wanted,
                hint=_other_reading(op, values, rows),
            )
    if ends and ends[-1] > rows:
        raise op.error(
            "group_list",
            got=f"groups of {ends[-1]} rows",
            want=f"<= {rows}, those of x",
            hint=_other_reading(op, values, rows),
        )
    return ends


def _ends(values: Sequence[int], group_list_type: int) -> list[int]:
    return list(values) if group_list_type == CUMSUM else list(accumulate(values))


def _other_reading(op: Call, values: Sequence[int], rows: int) -> str:
    """Return a hint when the list fits the other `group_list_type`, or else nothing."""
    if op.group_list_type == SPARSE:
        return ""
    other, meaning = {
        CUMSUM: (COUNT, "sizes of groups"),
        COUNT: (CUMSUM, "a running sum"),
    }[op.group_list_type]
    ends = _ends(values, other)
    if [0, *ends] != sorted([0, *ends]) or ends[-1] > rows:
        return ""
    return f"the values are valid as {meaning}: group_list_type={other}"
