"""Cases of the products family that are not plain: tables of GroupedMatmul, a row per use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec
from tests.vectors.question import NotAsked, Question
from tests.vectors.reading import dtype_of

_ABSENT = ("ZERO", "NONE", "ABSENT")
_SOC = {"Ascend910B": Soc.A2, "Ascend950": Soc.ASCEND950}
_ATTRS = {
    "split_item": "splitItem",
    "dtype": "outputDtypeAttr",
    "group_type": "groupType",
    "group_list_type": "groupListType",
    "act_type": "actType",
}


def _specs(case: dict[str, str], column: str) -> list[TensorSpec]:
    """Return the tensors of a column: shapes ``64:128;64:256`` of one dtype."""
    shapes = case[f"{column}Shape"]
    if shapes in _ABSENT:
        return []
    dtype = dtype_of({"BF16": "bfloat16"}.get(name := case[f"{column}Dtype"], name))
    return [TensorSpec(tuple(map(int, shape.split(":"))), dtype) for shape in shapes.split(";")]


def _grouped_matmul_infershape(case: dict[str, str]) -> Question:
    if not case["caseType"].startswith("non_quant"):
        raise NotAsked("a quantised product, which the op refuses")
    lists = [
        _specs(case, column)
        for column in (
            "x",
            "weight",
            "bias",
            "scale",
            "offset",
            "antiquantScale",
            "antiquantOffset",
            "groupList",
            "perTokenScale",
        )
    ]
    group_list, per_token_scale = (next(iter(found), None) for found in lists[7:])
    attrs: dict[str, Any] = {name: int(case[column]) for name, column in _ATTRS.items()}
    attrs |= {
        "transpose_weight": case["transposeWeight"] == "true",
        "transpose_x": case["transposeX"] == "true",
    }
    succeeds = case["expectSuccess"] == "true"
    return Question(
        op="GroupedMatmul",
        want="shapes" if succeeds else "reject",
        inputs=[*lists[:7], group_list, per_token_scale],
        attrs=attrs,
        soc=_SOC[case["socVersion"]],
        shapes=[list(map(int, shape.split(":"))) for shape in case["expectOutputShape"].split(";")]
        if succeeds
        else [],
        only_infershape=True,
    )


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "csv_grouped_matmul_infershape": _grouped_matmul_infershape,
}
