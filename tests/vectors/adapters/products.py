"""Cases of the products family that are not plain: tables of GroupedMatmul, a row per use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec
from tests.vectors.question import Question
from tests.vectors.reading import dtype_of

_ABSENT = ("ZERO", "NONE", "ABSENT")
_SOC = {"Ascend910B": Soc.A2, "Ascend950": Soc.ASCEND950}
_COLUMNS = (
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
_ATTRS = {
    "split_item": "splitItem",
    "dtype": "outputDtypeAttr",
    "group_type": "groupType",
    "group_list_type": "groupListType",
    "act_type": "actType",
}


def _specs(case: dict[str, str], column: str) -> list[TensorSpec]:
    """Return the tensors of a column: shapes ``64:128;64:256`` of one dtype."""
    shapes, name = case.get(f"{column}Shape", "NONE"), case.get(f"{column}Dtype", "NONE")
    if shapes in _ABSENT or name == "NONE":
        return []
    dtype = dtype_of({"BF16": "bfloat16"}.get(name, name))
    return [TensorSpec(tuple(map(int, shape.split(":"))), dtype) for shape in shapes.split(";")]


def _inputs(case: dict[str, str]) -> list[Any]:
    """Return the inputs in IR order."""
    lists = [_specs(case, column) for column in _COLUMNS]
    group_list, per_token_scale = (next(iter(found), None) for found in lists[7:])
    return [*lists[:7], group_list, per_token_scale]


def _grouped_matmul_infershape(case: dict[str, str]) -> Question:
    """A case of infershape, or ("dtype only") of the inference of dtypes.

    The tests pass an empty per_token_scale where it is absent. Only infershape of int8 products on
    A2 and A3 tells the difference, and wants ``[M]`` of it.
    """
    only_dtypes = case["caseType"].endswith("dtype_only")
    inputs = _inputs(case)
    if inputs[8] is None and not only_dtypes:
        inputs[8] = TensorSpec((0,), torch.float32)
    attrs: dict[str, Any] = {name: int(case[column]) for name, column in _ATTRS.items()}
    attrs |= {
        "transpose_weight": case["transposeWeight"] == "true",
        "transpose_x": case["transposeX"] == "true",
    }
    succeeds = case["expectSuccess"] == "true"
    shapes = [list(map(int, shape.split(":"))) for shape in case["expectOutputShape"].split(";")]
    return Question(
        op="GroupedMatmul",
        want=("accept" if only_dtypes else "shapes") if succeeds else "reject",
        inputs=inputs,
        attrs=attrs,
        soc=_SOC[case["socVersion"]],
        shapes=shapes if succeeds else [],
        only_infershape=True,
        part="dtypes" if only_dtypes else "shapes",
    )


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "csv_grouped_matmul_infershape": _grouped_matmul_infershape,
}
