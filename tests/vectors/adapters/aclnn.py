"""Cases of the aclnn functions: positional arguments, a status code expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_graph.ops import TensorSpec, find
from tests.vectors.adapters.plain import product
from tests.vectors.question import NotAsked, Question, Want
from tests.vectors.reading import dtype_of


def question(case: dict[str, Any], op: str, arguments: Sequence[str]) -> Question:
    """Read a case as a use of the GE op `op`.

    Args:
        case: the case.
        op: GE type.
        arguments: for each argument of the aclnn function, the input or attribute of `op` that it
            is; "" for one that the op does not have.

    Raises:
        NotAsked: the op is none of the project, or the product is not.
    """
    opdef = find(op)
    if opdef is None:
        raise NotAsked(f"{op} is not one of the ops of this project")
    given = dict(zip(arguments, case["inputs"], strict=True))
    attrs = {
        attr.name: given[attr.name]["value"]
        for attr in opdef.attrs
        if attr.name in given and not isinstance(given[attr.name].get("value"), (str, type(None)))
    }
    return Question(
        op=op,
        want=wanted(case),
        inputs=[spec(given.get(declared.name)) for declared in opdef.inputs],
        attrs=attrs,
        soc=product(case),
        outputs=[spec(entry) for entry in case["outputs"]],
    )


def wanted(case: dict[str, Any]) -> Want:
    """Return what the status code says; a case that compares none says it in its name."""
    codes = case["expect"].get("code", [])
    if codes:
        return "accept" if set(codes) & {"EQ:0", "EQ:ACLNN_SUCCESS"} else "reject"
    return "reject" if "error" in case["case"] or "invalid" in case["case"] else "accept"


def spec(entry: dict[str, Any] | None) -> TensorSpec | None:
    """Return the spec of a tensor argument, None for a null pointer."""
    if entry is None or entry.get("null"):
        return None
    return TensorSpec(tuple(entry["shape"]), dtype_of(entry["dtype"]))
