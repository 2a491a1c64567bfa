"""The ops that moe_graph defines, by GE type."""

from __future__ import annotations

from moe_graph.ops.opdef import OpDef

_opdefs: dict[str, OpDef] = {}


def register(opdef: OpDef) -> OpDef:
    """Add `opdef` and return it.

    Raises:
        ValueError: its GE type is taken.
    """
    if opdef.ge_type in _opdefs:
        raise ValueError(f"{opdef.ge_type} is registered already")
    _opdefs[opdef.ge_type] = opdef
    return opdef


def find(ge_type: str) -> OpDef | None:
    """Return the op of this GE type, None when moe_graph does not define it."""
    return _opdefs.get(ge_type)


def all_opdefs() -> list[OpDef]:
    """Return every op, in order of registration."""
    return list(_opdefs.values())
