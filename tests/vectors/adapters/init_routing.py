"""Cases of the init_routing family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec
from tests.vectors.adapters import plain
from tests.vectors.question import NotAsked, Question
from tests.vectors.reading import dtype_of

V3 = "MoeInitRoutingV3"


def _v3_tiling(case: dict[str, Any]) -> Question:
    """Upstream misspells ``active_expert_range`` and sets it by position, which still counts."""
    attrs = dict(case["attrs"])
    given = attrs.pop("acive_expert_range")
    attrs["active_expert_range"] = [
        attrs["expert_num"] if isinstance(item, str) else item for item in given
    ]
    return plain.tiling({**case, "attrs": attrs})


def _v1_tiling(case: dict[str, Any]) -> Question:
    """``active_num`` was not extracted; the rows of the declared output tell it."""
    rows = case["outputs"][0]["shape"][0]
    active = rows // max(case["inputs"][2]["shape"][-1], 1)
    return plain.tiling({**case, "attrs": {"active_num": active}})


def _v3_golden(case: dict[str, Any]) -> Question:
    """The golden data stop after the valid rows, and keep the scales as a column."""
    question = plain.golden(case)
    if question.values[3] is not None:
        question.values[3] = question.values[3].reshape(-1)
    question.only_leading = True
    return question


def _v3_helper(case: dict[str, Any]) -> Question:
    params = case["params"]
    if "InferDataType" in case["helper"]:
        return _v3_dtype(params)
    if case["helper"] == "RunFailureInferShape":
        return _v3_failure(case["case"], params)
    inputs = [
        _spec(params["xShape"], params["xDtype"]),
        _spec(params["expertIdxShape"], "int32"),
        _spec(params["scaleShape"], "float"),
        _spec(params.get("offsetShape"), "float"),
    ]
    attrs = {
        "active_num": params["activeNum"],
        "expert_capacity": params["expertCapacity"],
        "expert_num": params["expertNum"],
        "drop_pad_mode": params["dropPadMode"],
        "expert_tokens_num_type": params["expertTokensNumType"],
        "expert_tokens_num_flag": True,
        "quant_mode": params["quantMode"],
        "active_expert_range": params["activeExpertRange"],
        "row_idx_type": params["rowIdxType"],
    }
    shapes = [params[f"expectOutShape{index}"] for index in range(4)]
    return Question(V3, "shapes", inputs, attrs, Soc.ASCEND950, shapes=shapes)


def _v3_dtype(params: dict[str, Any]) -> Question:
    """A case of dtypes alone: whether 950 quantises this dtype in this mode."""
    mode = params["quantMode"]
    scale = _spec([1, 64], "float") if mode == 13 else None
    return Question(
        V3,
        "reject" if params.get("expectRet") == "FAILED" else "accept",
        [_spec([4, 64], params["xDtype"]), _spec([4, 2], "int32"), scale],
        {"expert_num": 8, "quant_mode": mode, "expert_tokens_num_flag": True},
        Soc.ASCEND950,
    )


_MODES = {"QUANT_MODE_STATIC": 0, "QUANT_MODE_HIF8_PERTENSOR": 7}
_WRONG_ATTRIBUTE = {
    "fail_expert_num": {"expert_num": 0},
    "fail_active_num": {"active_num": -2},
    "fail_drop_pad_mode": {"drop_pad_mode": 2},
    "fail_quant_mode": {"quant_mode": 18},
    "fail_row_idx_range": {"row_idx_type": 2},
}


def _v3_failure(name: str, params: dict[str, Any]) -> Question:
    """The attributes of these cases were not extracted; some names say what is wrong with them."""
    attrs = {"expert_num": 256, "quant_mode": -1}
    if "missing" in name:
        raise NotAsked("an optional attribute that is missing has its default here, as in a graph")
    if params["attrs"] == "attrs":
        attrs |= _WRONG_ATTRIBUTE[name.removeprefix("moe_init_routing_v3_infershape_")]
    for mode, number in _MODES.items():
        if mode in params["attrs"]:
            attrs["quant_mode"] = number
    shapes = [[32, 1024], [32, 8]]
    if isinstance(params["inputs"], list):
        shapes = [entry[0][0] for entry in params["inputs"]]
    elif "{16, 8}" in params["inputs"]:
        shapes = [[32, 1024], [16, 8]]
    dtypes = ("float16", "int32", "float", "float")
    inputs = [_spec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    return Question(V3, "reject", inputs, attrs, Soc.ASCEND950, only_infershape=True)


def _v3_function(case: dict[str, Any]) -> Question:
    """A call of aclnnMoeInitRoutingV3; its range was not extracted, the counts tell the size."""
    values = {entry.get("name"): entry for entry in case["inputs"]}
    outputs = [_spec(entry["shape"], entry["dtype"]) for entry in case["outputs"]]
    names = {
        "active_num": "activeNum",
        "expert_capacity": "expertCapacity",
        "expert_num": "expertNum",
        "drop_pad_mode": "dropPadMode",
        "expert_tokens_num_type": "expertTokensNumType",
        "expert_tokens_num_flag": "expertTokensNumFlag",
        "quant_mode": "quantMode",
        "row_idx_type": "rowIdxType",
    }
    attrs = {name: values[given]["value"] for name, given in names.items()}
    attrs["active_expert_range"] = [0, case["outputs"][2]["shape"][0]]
    inputs = [_spec(values[name]["shape"], values[name]["dtype"]) for name in ("x", "expertIdx")]
    return Question(V3, "accept", inputs, attrs, outputs=outputs)


def _spec(shape: list[int] | None, dtype: str) -> TensorSpec | None:
    return TensorSpec(tuple(shape), dtype_of(dtype)) if shape else None


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "tiling_moe_init_routing": _v1_tiling,
    "tiling_moe_init_routing_v3": _v3_tiling,
    "golden_moe_init_routing_v3": _v3_golden,
    "infershape_moe_init_routing_v3_helpercases": _v3_helper,
    "opapi_aclnn_moe_init_routing_v3": _v3_function,
}
