"""MoeUpdateExpert: choose the instance of each routed expert, and prune weak routes.

An expert may live on several ranks: ``eplb_table[e] = [n, rank_1, ..., rank_n, ...]``. For the
expert ``e = expert_ids[i, k]`` of token i, ``balanced_expert_ids[i, k] = eplb_table[e, 1 + j]``:

| balance_mode | j                                          |
|--------------|--------------------------------------------|
| 0            | ``local_rank_id // ceil(world_size / n)``  |
| 1            | ``i % n``                                  |

With ``expert_scales`` and ``pruning_threshold``, ``balanced_active_mask[i, k]`` is
``expert_scales[i, k] >= pruning_threshold[k] * sum of expert_scales[i, :]`` (fp32, the sum k
ascending) and ``active_mask[i]`` where that is given. Without them the mask is not written.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.poison import poisoned
from moe_graph.ops.limit import attribute, dim
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Form,
    Input,
    Limit,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    shape = op.dims("expert_ids", rank=2)
    return [TensorSpec(shape, op.expert_ids.dtype), TensorSpec(shape, torch.bool)]


def _tiling(op: Call) -> None:
    op.expect_one_of("balance_mode", (0, 1))
    tokens, top_k = op.dims("expert_ids", rank=2)
    op.dims("eplb_table", rank=2)
    if (op.expert_scales is None) != (op.pruning_threshold is None):
        missing = "expert_scales" if op.expert_scales is None else "pruning_threshold"
        raise op.error(
            missing, got="nothing", want="a tensor: scales and threshold are given together"
        )
    if op.active_mask is not None and op.expert_scales is None:
        raise op.error("expert_scales", got="nothing", want="a tensor, since active_mask is given")
    if op.expert_scales is not None:
        for axis, (got, want) in enumerate(
            zip(op.dims("expert_scales", rank=2), (tokens, top_k), strict=True)
        ):
            op.expect_equal("expert_scales", got, want, f"dim {axis}")
    if op.pruning_threshold is not None and op.pruning_threshold.rank_known:
        shape = op.pruning_threshold.shape
        if len(shape) != 1:
            shape = op.dims("pruning_threshold", rank=2)
            op.expect_equal("pruning_threshold", shape[0], 1, "dim 0")
        op.expect_equal("pruning_threshold", shape[-1], top_k, "last dim")
    if op.active_mask is not None:
        op.expect_equal("active_mask", op.dims("active_mask", rank=1)[0], tokens, "dim 0")
    if op.balance_mode == 0 and not 0 <= op.local_rank_id < op.world_size:
        raise op.error(
            "local_rank_id", got=op.local_rank_id, want=f"in [0, world_size = {op.world_size})"
        )


def _check_values(op: Call) -> None:
    experts, width = op.eplb_table.shape
    check_range(op, "expert_ids", op.expert_ids, 0, experts, "the rows of eplb_table")
    check_range(op, "eplb_table", op.eplb_table[:, 0], 1, width, "the instances of an expert")


def _compute(op: Call) -> Tensors:
    _check_values(op)
    instances = op.eplb_table[:, 0][op.expert_ids.long()]
    if op.balance_mode == 0:
        stride = (instances + (op.world_size - 1)).div_(instances, rounding_mode="floor")
        choice = torch.div(op.local_rank_id, stride, rounding_mode="floor")
    else:
        token = torch.arange(op.expert_ids.shape[0], device=instances.device, dtype=torch.int32)
        choice = token.unsqueeze(1) % instances
    balanced = op.eplb_table[op.expert_ids.long(), choice.long() + 1].to(op.expert_ids.dtype)
    return [balanced, _mask(op)]


def _mask(op: Call) -> torch.Tensor:
    if op.expert_scales is None:
        return poisoned(op.expert_ids.shape, torch.bool, op.expert_ids.device)
    scales = op.expert_scales.to(torch.float32)
    total = torch.zeros_like(scales[:, 0])
    for column in scales.unbind(1):
        total = total + column
    mask = scales >= op.pruning_threshold.view(1, -1) * total.unsqueeze(1)
    return mask if op.active_mask is None else mask & op.active_mask.unsqueeze(1)


def _naive(op: Call) -> Tensors:
    _check_values(op)
    balanced = torch.empty_like(op.expert_ids)
    mask = poisoned(op.expert_ids.shape, torch.bool, op.expert_ids.device)
    for i, row in enumerate(op.expert_ids.tolist()):
        for k, expert in enumerate(row):
            instances = int(op.eplb_table[expert, 0])
            if op.balance_mode == 0:
                choice = op.local_rank_id // -(-op.world_size // instances)
            else:
                choice = i % instances
            balanced[i, k] = op.eplb_table[expert, 1 + choice]
            if op.expert_scales is not None:
                total = torch.tensor(0.0)
                for scale in op.expert_scales[i]:
                    total = total + scale.to(torch.float32)
                floor = op.pruning_threshold.reshape(-1)[k] * total
                active = op.active_mask is None or bool(op.active_mask[i])
                mask[i, k] = active and bool(op.expert_scales[i, k].to(torch.float32) >= floor)
    return [balanced, mask]


def _world_size(op: Call) -> int | None:
    return op.world_size if op.balance_mode == 0 else None


_IDS = (torch.int32, torch.int64) * 3
_SCALES = (torch.bfloat16,) * 2 + (torch.float16,) * 2 + (torch.float32,) * 2
_SOURCE = "moe_update_expert/docs/aclnnMoeUpdateExpert.md"

OPDEF = register(
    OpDef(
        ge_type="MoeUpdateExpert",
        inputs=(
            Input("expert_ids", _IDS),
            Input("eplb_table", (torch.int32,)),
            Input("expert_scales", _SCALES, "optional"),
            Input("pruning_threshold", (torch.float32,), "optional"),
            Input("active_mask", (torch.bool,), "optional"),
        ),
        outputs=(
            Output("balanced_expert_ids"),
            Output("balanced_active_mask", dtype=torch.bool),
        ),
        attrs=(
            Attr("local_rank_id", "Int", -1),
            Attr("world_size", "Int", -1),
            Attr("balance_mode", "Int", 0),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            Limit("expert_ids", "T", dim("expert_ids", 0), _SOURCE, low=1, high=512),
            Limit("expert_ids", "K", dim("expert_ids", 1), _SOURCE, low=1, high=16),
            Limit("eplb_table", "E", dim("eplb_table", 0), _SOURCE, low=1, high=1024),
            Limit("eplb_table", "dim 1 of eplb_table", dim("eplb_table", 1), _SOURCE, low=2),
            Limit("world_size", "world_size", _world_size, _SOURCE, low=2, high=768),
            Limit(
                "balance_mode", "balance_mode", attribute("balance_mode"), _SOURCE, one_of=(0, 1)
            ),
        ),
        checked_outputs=("balanced_expert_ids", "balanced_active_mask"),
        compute=_compute,
        naive=_naive,
        no_gradient="expert ids and masks have no gradient",
        forms=(
            Form(
                "one rank",
                {"expert_ids": "T K", "eplb_table": "E F"},
                {"local_rank_id": 0, "world_size": 8},
            ),
            Form(
                "pruned",
                {
                    "expert_ids": "T K",
                    "eplb_table": "E F",
                    "expert_scales": "T K",
                    "pruning_threshold": "K",
                    "active_mask": "T",
                },
                {"balance_mode": 1},
            ),
        ),
        products=(Soc.A3, Soc.ASCEND950),
        function="moe_update_expert",
        doc="ops-transformer mc2/moe_update_expert: infershape; docs/aclnnMoeUpdateExpert.md; "
        "the values as torch_npu.npu_moe_update_expert documents them",
    )
)
