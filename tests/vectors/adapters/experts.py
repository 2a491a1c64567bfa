"""Cases of the experts family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_graph.config import Soc
from tests.vectors.adapters import plain
from tests.vectors.adapters.aclnn import question
from tests.vectors.question import NotAsked, Question

_UPDATE_EXPERT = (
    "expert_ids",
    "eplb_table",
    "expert_scales",
    "pruning_threshold",
    "active_mask",
    "local_rank_id",
    "world_size",
    "balance_mode",
)


def _tiling_of_expert_tokens(case: dict[str, Any]) -> Question:
    """Read num_experts, which was not extracted, off the output."""
    found = plain.tiling(case)
    found.attrs.setdefault("num_experts", case["outputs"][0]["shape"][0])
    return found


def _tiling_of_update_expert(case: dict[str, Any]) -> Question:
    """Read a case of A3, the first product that has the op.

    Raises:
        NotAsked: it is about the format of a tensor, which an OpDef does not see.
    """
    if any(entry.get("format", "ND") != "ND" for entry in case["inputs"]):
        raise NotAsked("tensors of PyTorch have no FRACTAL_NZ format")
    absent = {"shape": []}
    given = [absent if entry["shape"] == "ABSENT" else entry for entry in case["inputs"]]
    found = plain.tiling(case | {"inputs": given})
    found.soc = Soc.A3
    return found


def _op_api_of_update_expert(case: dict[str, Any]) -> Question:
    found = question(case, "MoeUpdateExpert", _UPDATE_EXPERT)
    if case["expect"]["code"] == ["NE:ACLNN_ERR_PARAM_INVALID"]:
        found.want = "accept"
    return found


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "tiling_moe_compute_expert_tokens": _tiling_of_expert_tokens,
    "tiling_moe_update_expert_arch22": _tiling_of_update_expert,
    "opapi_aclnn_moe_update_expert": _op_api_of_update_expert,
}
