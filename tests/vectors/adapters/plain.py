"""Cases that name a GE op, its inputs in IR order and its attributes."""

from __future__ import annotations

import re
from typing import Any

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec, find
from tests.vectors.question import NotAsked, Question
from tests.vectors.reading import dtype_of, tensor_of

_PRODUCTS = {
    "ascend910b": Soc.A2,
    "ascend910_93": Soc.A3,
    "ascend950": Soc.ASCEND950,
    "ascend910_95": Soc.ASCEND950,
}


def infershape(case: dict[str, Any]) -> Question:
    """Read a case of an infershape unit test."""
    rejects = "error" in case["expect"]
    return Question(
        op=case["op"],
        want="reject" if rejects else "shapes",
        inputs=specs(case["inputs"]),
        attrs=ir_names(case["attrs"]),
        soc=product(case),
        shapes=[] if rejects else case["expect"]["shapes"],
        only_infershape=True,
    )


def tiling(case: dict[str, Any]) -> Question:
    """Read a case of a tiling unit test: the op runs on these inputs, or refuses to.

    Some cases pass more inputs than the op has; tiling never looks at those.
    """
    opdef = find(case["op"])
    known = len(opdef.inputs) if opdef else None
    return Question(
        op=case["op"],
        want="reject" if "error" in case["expect"] else "accept",
        inputs=specs(case["inputs"][:known]),
        attrs=ir_names(case["attrs"]),
        soc=product(case),
        outputs=specs(case["outputs"]),
    )


def golden(case: dict[str, Any]) -> Question:
    """Read a case with the values of its inputs and outputs."""
    return Question(
        op=case["op"],
        want="values",
        inputs=[None if entry is None else tensor_of(entry) for entry in case["inputs"]],
        attrs=ir_names(case["attrs"]),
        values=[None if entry is None else tensor_of(entry) for entry in case["outputs"]],
    )


def specs(entries: list[dict[str, Any]]) -> list[Any]:
    """Return the specs of inputs or outputs; the shape ``[]`` stands for an absent one."""
    return [
        TensorSpec(tuple(entry["shape"]), dtype_of(entry["dtype"])) if entry["shape"] else None
        for entry in entries
    ]


def ir_names(attrs: dict[str, Any]) -> dict[str, Any]:
    """Return attributes by IR name; upstream writes some in camel case."""
    return {re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): attrs[name] for name in attrs}


def product(case: dict[str, Any]) -> Soc:
    """Return the product that a case names, A2 when it names none.

    Raises:
        NotAsked: this project does not know the product.
    """
    named = str(case.get("soc") or "") + str(case.get("para_extra") or "")
    for name, soc in _PRODUCTS.items():
        if name in named.lower():
            return soc
    if "310p" in named.lower() or "310p" in case["case"].lower():
        raise NotAsked("Ascend 310P is not one of the products of this project")
    is_950 = any(mark in case["case"].lower() for mark in ("regbase", "arch35", "ascend950"))
    return Soc.ASCEND950 if is_950 else Soc.A2
