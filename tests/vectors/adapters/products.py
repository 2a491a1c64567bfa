"""Cases of the products family that are not plain: tables of GroupedMatmul, a row per use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec
from tests.vectors.question import NotAsked, Question
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
_FAILURES = (
    "invalid",
    "fail",
    "bad",
    "reject",
    "mismatch",
    "unsupported",
    "illegal",
    "forbidden",
    "null",
)
_GE_DTYPES = {"INT8": -1, "FLOAT16": 0, "BF16": 1, "INT32": 2, "FLOAT": 3}
"""Values of the attribute ``dtype``."""
_NO_DTYPE = 4
"""Stands for the dtypes that the attribute has no value for."""
_FUNCTION_ATTRS = {
    "split_item": "splitItem",
    "group_type": "groupType",
    "group_list_type": "groupListType",
    "act_type": "actType",
}
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


def _functions(case: dict[str, str]) -> Question:
    """A call of the aclnn functions, which read transposes off strides: ``shape#strides#storage``.

    A list without values is a null pointer. A test that does not compare the code it expects says
    in its name when it expects a failure. Mx scales have K after M or before N here, whatever is
    transposed; in the IR they are transposed like x and weight.
    """
    if case["socVersion"] not in _SOC:
        raise NotAsked(f"{case['socVersion']} is not one of the products of this project")
    lists, transposed = {}, {}
    for column in _COLUMNS:
        tensors = [text.split("#") for text in case.get(f"{column}Shape", "NONE").split(";")]
        strides = [_sizes(parts[1]) for parts in tensors if len(parts) > 1]
        transposed[column] = any(each[-2] == 1 and each[-1] != 1 for each in strides)
        specs = _specs({**case, f"{column}Shape": ";".join(parts[0] for parts in tensors)}, column)
        lists[column] = specs
    if any(len(weight.shape) > 3 for weight in lists["weight"]):
        raise NotAsked("a weight by the shape of its FRACTAL_NZ storage")
    for column in ("x", "weight"):
        if transposed[column]:
            lists[column] = [_turned(spec, -2) for spec in lists[column]]
    if transposed["weight"]:
        scales = lists["antiquantScale"]
        lists["antiquantScale"] = [_turned(s, -3) if len(s.shape) == 4 else s for s in scales]
    if case["groupType"] == "2":
        scales = lists["perTokenScale"]
        lists["perTokenScale"] = [_turned(s, -3) if len(s.shape) == 3 else s for s in scales]
    inputs = [[spec for spec in lists[column] if spec.shape != (0,)] for column in _COLUMNS[:7]]
    given = case["groupListValues"] != "NONE"
    group_list = next(iter(lists["groupList"]), None) if given else None
    attrs: dict[str, Any] = {name: int(case[column]) for name, column in _FUNCTION_ATTRS.items()}
    attrs |= {
        "dtype": _GE_DTYPES.get(case["outDtype"], _NO_DTYPE),
        "transpose_weight": transposed["weight"],
        "transpose_x": transposed["x"],
    }
    return Question(
        op="GroupedMatmul",
        want="reject" if _fails(case) else "accept",
        inputs=[*inputs, group_list, next(iter(lists["perTokenScale"]), None)],
        attrs=attrs,
        soc=_SOC[case["socVersion"]],
        outputs=_specs(case, "out") if case["outDtype"] in _GE_DTYPES else None,
    )


def _sizes(text: str) -> list[int]:
    return list(map(int, text.split(":")))


def _turned(spec: TensorSpec, dim: int) -> TensorSpec:
    """Swap `dim` and the one after it."""
    shape = list(spec.shape)
    shape[dim], shape[dim + 1] = shape[dim + 1], shape[dim]
    return TensorSpec(tuple(shape), spec.dtype)


def _fails(case: dict[str, str]) -> bool:
    if case["checkRet"] == "true" or case["expectRet"] != "0":
        return case["expectRet"] != "0"
    return any(mark in case["caseName"] for mark in _FAILURES)


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "csv_aclnn_grouped_matmul": _functions,
    "csv_grouped_matmul_infershape": _grouped_matmul_infershape,
}
