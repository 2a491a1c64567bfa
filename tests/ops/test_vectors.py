"""The OpDefs against the public unit tests of ops-transformer: infershape, tiling and golden data.

A case that is not followed stands in a table with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_graph.config import Soc
from moe_graph.ops import OpError, TensorSpec, find, infer_shape
from tests.ops.op_vectors import DTYPES, cases, tensor

INFERSHAPE = [
    *cases("infershape_moe_init_routing_v2_infershape"),
    *cases("infershape_moe_init_routing_v2_grad_infershape"),
    *cases("infershape_moe_finalize_routing_v2_infershape"),
    *cases("infershape_moe_finalize_routing_v2_grad_infershape"),
]


def _attrs(case: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes; those of MoeFinalizeRoutingV2 were lost, but 3-D rows are drop/pad."""
    is_combine = case["op"] == "MoeFinalizeRoutingV2" and not case["attrs"]
    if is_combine and "error" not in case["expect"] and len(case["inputs"][0]["shape"]) == 3:
        return {"drop_pad_mode": 1}
    return case["attrs"]


def _shape_and_dtype(entry: dict[str, Any]) -> tuple[list[int], str] | None:
    return (entry["shape"], entry["dtype"]) if entry["shape"] else None


@pytest.mark.parametrize("case", INFERSHAPE)
def test_infershape(case: dict[str, Any]) -> None:
    inputs = [_shape_and_dtype(entry) for entry in case["inputs"]]
    if "error" in case["expect"]:
        with pytest.raises(OpError):
            infer_shape(case["op"], inputs, case["attrs"])
        return
    shapes = infer_shape(case["op"], inputs, _attrs(case))
    expected = case["expect"]["shapes"]
    assert [list(shape) for shape in shapes[: len(expected)] if shape is not None] == expected


TILING = [
    *cases("tiling_moe_init_routing_v2"),
    *cases("tiling_moe_init_routing_v2_grad"),
    *cases("tiling_moe_finalize_routing_v2"),
    *cases("tiling_moe_finalize_routing_v2_arch35"),
    *cases("tiling_moe_finalize_routing_v2_grad"),
    *cases("tiling_moe_finalize_routing_v2_grad_arch35"),
]

LOST = "the attribute that is wrong was not extracted"
DECLARED_OUTPUT = "rejects the shape or dtype of a declared output, which an OpDef infers"
TILING_NOT_FOLLOWED = {
    "moe_init_routing_v2_grad_tiling_16": DECLARED_OUTPUT,
    "moe_init_routing_v2_grad_tiling_invalid_dtype_mismatch_18": DECLARED_OUTPUT,
    "moe_init_routing_v2_grad_tiling_invalid_grad_x_dim_22": DECLARED_OUTPUT,
    "moe_init_routing_v2_tiling_regbase_dropless": "a 1-D expert_idx and a negative active_num "
    "pass 950's tiling, but GE's infershape rejects both before it",
    "MoeFinalizeRoutingTilingV2_invalid_drop_pad_mode": LOST,
    "MoeFinalizeRoutingV2_arch35_droppad_invalid_expert_range": LOST,
    "MoeFinalizeRoutingV2_arch35_invalid_drop_pad_mode": LOST,
    "MoeFinalizeRoutingV2_arch35_kh_full_load_small_k": "950's tiling takes more indices than rows "
    "without drop/pad, but GE's infershape rejects it before",
    "MoeFinalizeRoutingV2GradTiling_20002_002": "passes a float expert_idx, which the IR rejects",
}


@pytest.mark.parametrize("case", TILING)
def test_tiling(case: dict[str, Any]) -> None:
    if reason := TILING_NOT_FOLLOWED.get(case["case"]):
        pytest.skip(reason)
    opdef = find(case["op"])
    assert opdef is not None
    soc = "950" if "regbase" in case["case"] or "arch35" in case["case"] else "A2"
    inputs = [
        TensorSpec(tuple(entry["shape"]), DTYPES[entry["dtype"]]) if entry["shape"] else None
        for entry in case["inputs"][: len(opdef.inputs)]
    ]
    attrs = opdef.bind_attrs(_attrs(case))
    if "error" in case["expect"]:
        with pytest.raises(OpError):
            opdef.infer(inputs, attrs, Soc.parse(soc))
    else:
        opdef.infer(inputs, attrs, Soc.parse(soc))


GOLDEN = [*cases("golden_moe_init_routing_v2"), *cases("golden_moe_init_routing_v2_grad")]


@pytest.mark.parametrize("path", ["kernel", "reference"])
@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: dict[str, Any], path: str) -> None:
    opdef = find(case["op"])
    assert opdef is not None
    inputs = [tensor(entry) for entry in case["inputs"]]
    outputs = getattr(opdef, path)(inputs, opdef.bind_attrs(case["attrs"]))
    for got, expected in zip(outputs, case["outputs"], strict=True):
        if expected is None:
            continue
        assert got is not None
        torch.testing.assert_close(got, tensor(expected).to(got.dtype), rtol=0, atol=0)


GROUPED = cases("csv_grouped_matmul_infershape")
QUANTISED = "quantised product"
GROUPED_NOT_FOLLOWED = {
    "grouped_matmul_infershape_0": "bias float beside x float16: the IR and the aclnn table want "
    "float16, infershape does not look",
    "nonquant_dtype_only_fp16_success_910b": "a dtype-only case: it gives a group_list to "
    "group_type -1, which the shape rules reject",
    "infershape_splitm_singlex_multiw_multiy_grouplist": "the sizes of y depend on the values of "
    "group_list",
    "infershape_splitk_singlex_multiw_multiy_transx": "several y with split_item 3: GE reads their "
    "number off the node",
}


def _tensors(shapes: str, dtype: str) -> list[tuple[list[int], str]]:
    if shapes in ("ZERO", "NONE", "ABSENT"):
        return []
    names = {"FLOAT16": "float16", "FLOAT": "float32", "BF16": "bfloat16", "INT8": "int8"}
    return [
        ([int(dim) for dim in shape.split(":")], names.get(dtype, dtype.lower()))
        for shape in shapes.split(";")
    ]


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_matmul_csv(case: dict[str, str]) -> None:
    name = case["caseName"]
    if not case["caseType"].startswith("non_quant"):
        pytest.skip(QUANTISED)
    if name in GROUPED_NOT_FOLLOWED:
        pytest.skip(GROUPED_NOT_FOLLOWED[name])
    group_list = _tensors(case["groupListShape"], "int64")
    inputs = [
        _tensors(case["xShape"], case["xDtype"]),
        _tensors(case["weightShape"], case["weightDtype"]),
        _tensors(case["biasShape"], case["biasDtype"]),
        *([[]] * 4),
        group_list[0] if group_list else None,
    ]
    attrs = {
        "split_item": int(case["splitItem"]),
        "transpose_weight": case["transposeWeight"] == "true",
        "transpose_x": case["transposeX"] == "true",
        "group_type": int(case["groupType"]),
        "group_list_type": int(case["groupListType"]),
        "act_type": int(case["actType"]),
    }
    soc = {"Ascend910B": "A2", "Ascend950": "950"}[case["socVersion"]]
    if case["expectSuccess"] == "false":
        with pytest.raises(OpError):
            infer_shape("GroupedMatmul", inputs, attrs, soc)
        return
    expected = [shape for shape, _ in _tensors(case["expectOutputShape"], "float32")]
    got = infer_shape("GroupedMatmul", inputs, attrs, soc)
    assert [list(shape) for shape in got if shape is not None] == expected
