"""Cases of the routing_map family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_graph.ops import TensorSpec
from tests.vectors.adapters import plain
from tests.vectors.adapters.aclnn import question
from tests.vectors.question import Question

_PERMUTE = ("tokens", "routing_map", "probs", "num_out_tokens", "drop_and_pad")
_PERMUTE_GRAD = (
    "permuted_token_output_grad",
    "permuted_probs_output_grad_optional",
    "sorted_indices",
    "routing_map_optional",
    "num_experts",
    "tokens_num",
    "padded_mode",
)
_UNPERMUTE = (
    "permuted_tokens",
    "sorted_indices",
    "routing_map",
    "probs",
    "drop_and_pad",
    "restore_shape",
)


def _permute_aclnn(case: dict[str, Any]) -> Question:
    """The aclnn function takes ``[T, E]`` and hands ``[E, T]`` on to the op."""
    found = question(case, "MoeTokenPermuteWithRoutingMap", _PERMUTE)
    found.inputs[1:] = [_transposed(spec) for spec in found.inputs[1:]]
    return found


def _transposed(spec: TensorSpec | None) -> TensorSpec | None:
    return spec if spec is None else replace(spec, shape=spec.shape[::-1])


def _permute_tiling(case: dict[str, Any]) -> Question:
    """Tiling looks at no dtype: the cases have an int32 map and list the outputs in any order."""
    found = plain.tiling(case)
    found.inputs[1] = replace(found.inputs[1], dtype=torch.int8)
    probs = found.inputs[2] if len(found.inputs) > 2 else None
    dtypes = (found.inputs[0].dtype, (probs or found.inputs[0]).dtype, torch.int32)
    assert found.outputs is not None
    found.outputs = [
        None if spec is None else replace(spec, dtype=dtype)
        for spec, dtype in zip(found.outputs, dtypes, strict=True)
    ]
    return found


def _permute_grad_infershape(case: dict[str, Any]) -> Question:
    """The case calls the second attribute, tokens_num, by another name."""
    found = plain.infershape(case)
    found.attrs["tokens_num"] = found.attrs.pop("num_topk")
    return found


def _permute_grad_tiling(case: dict[str, Any]) -> Question:
    """Give the attributes, which were not extracted, and dtypes, which tiling does not look at.

    The map has T and E; the key of the tiling tells whether it is that of drop and pad.
    """
    found = plain.tiling(case)
    tokens, experts = found.inputs[3].shape
    padded = case["expect"].get("tiling_key") == 1000
    found.attrs = {"num_experts": experts, "tokens_num": tokens, "padded_mode": padded}
    assert found.outputs is not None
    assert found.outputs[1] is not None
    found.inputs[1] = replace(found.inputs[1], dtype=found.outputs[1].dtype)
    found.inputs[3] = replace(found.inputs[3], dtype=torch.int8)
    return found


def _unpermute_aclnn(case: dict[str, Any]) -> Question:
    """The page: restoreShape is the shape of the result; without probs the map is not read."""
    found = question(case, "MoeTokenUnpermuteWithRoutingMap", _UNPERMUTE)
    assert found.outputs is not None
    assert found.outputs[0] is not None
    if not case["inputs"][5].get("null"):
        found.attrs["restore_shape"] = found.outputs[0].shape
    if found.inputs[3] is None:
        found.inputs[2] = None
    return found


def _unpermute_tiling(case: dict[str, Any]) -> Question:
    """drop_and_pad has another name in the cases, and the text of its value for a value."""
    found = plain.tiling(case)
    found.attrs["drop_and_pad"] = "true" in found.attrs.pop("drop_pad_mode")
    return found


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "infershape_moe_token_permute_with_routing_map_grad_infershape": _permute_grad_infershape,
    "opapi_aclnn_moe_token_permute_with_routing_map": _permute_aclnn,
    "opapi_aclnn_moe_token_permute_with_routing_map_grad": lambda case: question(
        case, "MoeTokenPermuteWithRoutingMapGrad", _PERMUTE_GRAD
    ),
    "opapi_aclnn_moe_token_unpermute_with_routing_map": _unpermute_aclnn,
    "tiling_moe_token_permute_with_routing_map": _permute_tiling,
    "tiling_moe_token_permute_with_routing_map_grad": _permute_grad_tiling,
    "tiling_moe_token_unpermute_with_routing_map": _unpermute_tiling,
}
