"""Cases of the finalize_routing family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vectors.adapters import plain
from tests.vectors.adapters.aclnn import question
from tests.vectors.question import Question

_V2 = ("expanded_x", "expanded_row_idx", "x1", "x2", "bias", "scales", "expert_idx")
_V3 = (*_V2, "x", "a1", "a2", "v")
_RANGES = ("zero_expert_range", "copy_expert_range", "constant_expert_range")
_GRAD = (
    "grad_y",
    "expanded_row_idx",
    "expanded_x",
    "scales",
    "expert_idx",
    "bias",
    "drop_pad_mode",
    "active_num",
    "expert_num",
    "expert_capacity",
)


def _with_lost_mode(read: Callable[[Any], Question]) -> Callable[[Any], Question]:
    """Give drop_pad_mode, which was not extracted, where a case succeeds on rows in 3-D."""

    def adapter(case: dict[str, Any]) -> Question:
        found = read(case)
        if not found.attrs and found.want != "reject" and len(found.inputs[0].shape) == 3:
            found.attrs["drop_pad_mode"] = 1
        return found

    return adapter


ADAPTERS: dict[str, Callable[[Any], Question]] = {
    "infershape_moe_finalize_routing_v2_infershape": _with_lost_mode(plain.infershape),
    "tiling_moe_finalize_routing_v2": _with_lost_mode(plain.tiling),
    "tiling_moe_finalize_routing_v2_arch35": _with_lost_mode(plain.tiling),
    "opapi_aclnn_moe_finalize_routing_v2": lambda case: question(
        case, "MoeFinalizeRoutingV2", (*_V2, "drop_pad_mode")
    ),
    "opapi_aclnn_moe_finalize_routing_v3": lambda case: question(
        case, "MoeFinalizeRoutingV2", (*_V3, "drop_pad_mode", *_RANGES)
    ),
    "opapi_aclnn_moe_finalize_routing_v2_grad": lambda case: question(
        case, "MoeFinalizeRoutingV2Grad", _GRAD
    ),
}
