"""Cases of the distribute family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops import OpDef, TensorSpec, find
from tests.vectors.adapters import plain
from tests.vectors.question import NotAsked, Question
from tests.vectors.reading import dtype_of

_GE_DTYPES = {"FLOAT16": 1, "INT8": 2, "BF16": 27, "FLOAT8_E5M2": 35, "FLOAT8_E4M3FN": 36}
"""The tables set the dtype of expand_x itself, which an OpDef takes from ``y_dtype``."""


_ABSENT = {"shape": [], "dtype": "float"}
"""What a name for no tensor (``kTdDefaultNone``) stands for."""


def _tiling(case: dict[str, Any]) -> Question:
    name = case["case"]
    if "FractalNz" in name:
        raise NotAsked("a memory format is no part of a spec")
    if any(mark in name for mark in ("WinSize", "HcclBuff", "Window")):
        raise NotAsked("the size of the communication buffer is no attribute of the op")
    if "norm_eps" in case["attrs"]:
        raise NotAsked("MoeDistributeCombineAddRmsNorm is not one of the ops of this project")
    if "param" in case["case"]:
        raise NotAsked("a template: its sizes stand in a table")
    attrs = _integers(case["attrs"])
    if case["op"].endswith("V3"):
        # The tests of the third version give the attributes of the second.
        attrs = {name: attrs[name] for name in attrs if name not in ("group_ep", "group_tp")}
        attrs["ccl_buffer_size"] = 0
    inputs = [_ABSENT if isinstance(e["shape"], str) else e for e in case["inputs"]]
    question = plain.tiling({**case, "inputs": inputs, "attrs": attrs})
    inputs = question.inputs
    combines = "combine" in case["source_path"] and len(inputs) > 5
    scales = 5 if case["op"].endswith("V3") else 4
    # Some tests give tp_send_counts before expert_scales, in some with swapped dtypes. A2 looks at
    # neither; the other products find that expert_scales has one dimension, and fail.
    swapped = combines and len(inputs[scales].shape) == 1
    named_so = name.endswith(("Success", "Warn")) and not swapped
    if not named_so and "tiling_key" not in case["expect"]:
        # A test that names no result expects a failure; the extraction says SUCCESS for it.
        question.want = "reject"
    if question.soc is Soc.A2:
        question.outputs = None  # A2 compares none with what was allocated
        if swapped:
            inputs[4:6] = (
                TensorSpec(inputs[5].shape, torch.float32),
                TensorSpec(inputs[4].shape, torch.int32),
            )
    return question


def _integers(attrs: dict[str, Any]) -> dict[str, Any]:
    """Hexadecimal numbers stand as text, and mean a 64-bit attribute."""
    return {
        name: int(value, 16) if isinstance(value, str) and value.startswith("0x") else value
        for name, value in attrs.items()
    }


def _table(ge_type: str) -> Callable[[dict[str, str]], Question]:
    """Return the reader of a table of tiling cases on Ascend 950, one row each."""

    def read(row: dict[str, str]) -> Question:
        opdef = find(ge_type)
        assert opdef is not None
        if "fractal_nz" in row["case_name"]:
            raise NotAsked("a memory format is no part of a spec")
        return Question(
            ge_type,
            "reject" if row["expectResult"] == "FAILED" else "accept",
            [_spec(row, declared.name) for declared in opdef.inputs],
            _attrs(opdef, row),
            Soc.ASCEND950,
            [_spec(row, output.name) for output in opdef.outputs],
        )

    return read


def _spec(row: dict[str, str], name: str) -> TensorSpec | None:
    shape = row.get(f"{name}_shape")
    if not shape:
        return None
    return TensorSpec(tuple(map(int, shape.split())), dtype_of(row[f"{name}_dtype"]))


def _attrs(opdef: OpDef, row: dict[str, str]) -> dict[str, Any]:
    attrs: dict[str, Any] = {}
    for attr in opdef.attrs:
        text = row.get(attr.name)
        if attr.name == "y_dtype":
            attrs[attr.name] = _GE_DTYPES[row["expand_x_dtype"]]
        elif text is not None:
            attrs[attr.name] = text if attr.type == "Str" else int(text)
    return attrs


_WHOLE_CALLS: dict[str, list[TensorSpec]] = {
    "Dispatch": [TensorSpec((8, 7168), torch.float16), TensorSpec((8, 6), torch.int32)],
    "Combine": [
        TensorSpec((512, 7168), torch.float16),
        TensorSpec((8, 6), torch.int32),
        TensorSpec((512 * 128,), torch.int32),
        TensorSpec((64,), torch.int32),
        TensorSpec((8, 6), torch.float32),
    ],
}
"""Inputs of 16 ranks with 4 experts each."""


def _aclnn(ge_type: str) -> Callable[[dict[str, Any]], Question]:
    """Return the reader of calls of an aclnn function, which looks at the names of groups alone.

    The sizes in these calls fit nothing, and the functions pass them on; so the question is about a
    call that is right but for the names. Code "not PARAM_INVALID" is what a call that passes gets.
    """

    def read(case: dict[str, Any]) -> Question:
        texts = [e["value"] for e in case["inputs"] if isinstance(e.get("value"), str)]
        group_ep, group_tp = map(_group_name, texts[:2])
        codes = case["expect"]["code"]
        want = "accept" if codes == ["NE:ACLNN_ERR_PARAM_INVALID"] else "reject"
        kind = "Dispatch" if "Dispatch" in ge_type else "Combine"
        attrs = {"ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 64}
        soc = plain.product({**case, "soc": case["soc"].lower()})
        names = {"group_ep": group_ep, "group_tp": group_tp}
        return Question(ge_type, want, list(_WHOLE_CALLS[kind]), {**attrs, **names}, soc)

    return read


def _no_question(case: dict[str, Any]) -> Question:
    raise NotAsked("the calls differ in the names of groups, which the third version has not")


def _group_name(text: str) -> str:
    """Return a name as the test passes it: a literal in quotes, or a variable."""
    if text.startswith('"'):
        return text.strip('"')
    return "g" * 128 if "long" in text else text


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "tiling_moe_distribute_dispatch_arch22": _tiling,
    "tiling_moe_distribute_dispatch_v2_arch22": _tiling,
    "tiling_moe_distribute_dispatch_v2_arch35": _tiling,
    "tiling_moe_distribute_dispatch_v3_arch22": _tiling,
    "tiling_moe_distribute_dispatch_v3_arch35": _tiling,
    "tiling_moe_distribute_combine_arch22": _tiling,
    "tiling_moe_distribute_combine_arch35": _tiling,
    "tiling_moe_distribute_combine_v2_arch22": _tiling,
    "tiling_moe_distribute_combine_v3_arch22": _tiling,
    "opapi_aclnn_moe_distribute_dispatch": _aclnn("MoeDistributeDispatch"),
    "opapi_aclnn_moe_distribute_dispatch_v2": _aclnn("MoeDistributeDispatchV2"),
    "opapi_aclnn_moe_distribute_dispatch_v3_v4": _aclnn("MoeDistributeDispatchV2"),
    "opapi_aclnn_moe_distribute_combine": _aclnn("MoeDistributeCombine"),
    "opapi_aclnn_moe_distribute_combine_v2": _aclnn("MoeDistributeCombineV2"),
    "opapi_aclnn_moe_distribute_combine_v3": _aclnn("MoeDistributeCombineV2"),
    "opapi_aclnn_moe_distribute_combine_v4": _aclnn("MoeDistributeCombineV2"),
    "opapi_aclnn_moe_distribute_dispatch_v5": _no_question,
    "csv_moe_distribute_dispatch_v2_tiling": _table("MoeDistributeDispatchV2"),
    "csv_moe_distribute_combine_v2_tiling": _table("MoeDistributeCombineV2"),
}
