"""Cases of the token_permute family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_graph.ops import TensorSpec, find
from tests.vectors.adapters import plain
from tests.vectors.adapters.aclnn import question
from tests.vectors.question import NotAsked, Question

_PERMUTE = ("tokens", "indices", "num_out_tokens", "padded_mode")
_PERMUTE_GRAD = ("permuted_output_grad", "sorted_indices", "num_topk", "padded_mode")
_UNPERMUTE = ("permuted_tokens", "sorted_indices", "probs", "padded_mode", "restore_shape")
_UNPERMUTE_GRAD = (
    "permuted_tokens",
    "unpermuted_tokens_grad",
    "sorted_indices",
    "probs",
    "padded_mode",
    "restore_shape",
)


def _infershape(case: dict[str, Any]) -> Question:
    """Read a case whose lists were extracted by name only, or that states no shapes."""
    attrs = {name: value for name, value in case["attrs"].items() if not isinstance(value, str)}
    expect = case["expect"]
    found = plain.infershape({**case, "attrs": attrs, "expect": {**expect, "shapes": []}})
    if expect.get("shapes", []) is None:
        found.want = "accept"
    elif "shapes" in expect:
        found.shapes = expect["shapes"]
    return found


def _tiling(case: dict[str, Any]) -> Question:
    """Read a case whose attributes are those of another op, or a bool given as an int."""
    attrs = {
        name: bool(value) if name == "padded_mode" else value
        for name, value in plain.ir_names(case["attrs"]).items()
        if name != "drop_pad_mode"
    }
    return plain.tiling({**case, "attrs": attrs})


def _tiling_of_gradient(case: dict[str, Any]) -> Question:
    """Read a case of a tiling that does not look at what is allocated for the outputs."""
    found = _tiling(case)
    found.outputs = None
    return found


def _aclnn(op: str, arguments: tuple[str, ...]) -> Callable[[Any], Question]:
    """Read a case of an aclnn function, which compares dtypes of outputs, not their shapes."""

    def adapter(case: dict[str, Any]) -> Question:
        found = question(case, op, arguments)
        opdef = find(op)
        assert opdef is not None
        if found.want == "accept" and found.outputs is not None:
            attrs = opdef.bind_attrs(found.attrs)
            specs = opdef.infer_shape(found.inputs, attrs, found.soc, upstream=True)
            found.outputs = [
                given if given is None or spec is None else TensorSpec(spec.shape, given.dtype)
                for spec, given in zip(specs, found.outputs, strict=True)
            ]
        return found

    return adapter


def _aclnn_permute(case: dict[str, Any]) -> Question:
    if case["op"] == "aclnnMoeTokenPermute":
        return _aclnn("MoeTokenPermute", _PERMUTE)(case)
    *rest, quant_mode = case["inputs"]
    if quant_mode["value"] != -1:
        raise NotAsked("aclnnMoeTokenPermuteV2 with quantisation is no GE op of this project")
    return _aclnn("MoeTokenPermute", _PERMUTE)(
        {**case, "inputs": rest, "outputs": case["outputs"][:2]}
    )


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    **{
        f"infershape_{name}_infershape": _infershape
        for name in (
            "moe_token_permute",
            "moe_token_permute_with_ep",
            "moe_token_unpermute",
            "moeTokenUnpermuteWithEp",
            "moeTokenUnpermuteWithEpGrad",
        )
    },
    "tiling_moe_token_permute_grad": _tiling_of_gradient,
    "tiling_moe_token_unpermute": _tiling,
    "tiling_moe_token_unpermute_grad": _tiling_of_gradient,
    "opapi_aclnn_moe_token_permute": _aclnn_permute,
    "opapi_aclnn_moe_token_permute_grad": _aclnn("MoeTokenPermuteGrad", _PERMUTE_GRAD),
    "opapi_aclnn_moe_token_unpermute": _aclnn("MoeTokenUnpermute", _UNPERMUTE),
    "opapi_aclnn_moe_token_unpermute_grad": _aclnn("MoeTokenUnpermuteGrad", _UNPERMUTE_GRAD),
}
