"""MoeComputeExpertTokens: running row counts of rows that are sorted by expert.

``total_rows_before_expert[e]`` is the number of entries of ``sorted_experts`` that are ``<= e``:
expert e has the rows from ``total_rows_before_expert[e - 1]`` to ``total_rows_before_expert[e]``.
"""

from __future__ import annotations

import torch

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
    op.dims("sorted_experts", rank=1)
    experts = op.expect_at_least("num_experts", 1)
    return [TensorSpec((experts,), torch.int32)]


def _check_sorted(op: Call) -> None:
    ids = op.sorted_experts
    if bool((ids[1:] < ids[:-1]).any()):
        raise op.error("sorted_experts", got="ids out of order", want="ascending ids")


def _compute(op: Call) -> Tensors:
    _check_sorted(op)
    experts = torch.arange(op.num_experts, dtype=torch.int32, device=op.sorted_experts.device)
    return [torch.searchsorted(op.sorted_experts, experts, right=True, out_int32=True)]


def _naive(op: Call) -> Tensors:
    _check_sorted(op)
    ids = op.sorted_experts.tolist()
    counts = [sum(expert <= e for expert in ids) for e in range(op.num_experts)]
    return [torch.tensor(counts, dtype=torch.int32)]


_SOURCE = "moe_compute_expert_tokens/docs/aclnnMoeComputeExpertTokens.md"

OPDEF = register(
    OpDef(
        ge_type="MoeComputeExpertTokens",
        inputs=(Input("sorted_experts", (torch.int32,)),),
        outputs=(Output("total_rows_before_expert", dtype=torch.int32),),
        attrs=(Attr("num_experts", "Int"),),
        shape_rule=_shapes,
        compute=_compute,
        naive=_naive,
        limits=(
            Limit("num_experts", "E", attribute("num_experts"), _SOURCE, low=1, high=2048),
            Limit("sorted_experts", "rows", dim("sorted_experts", 0), _SOURCE, high=2**24 - 1),
        ),
        no_gradient="expert ids and counts are integers",
        forms=(Form("any", {"sorted_experts": "R"}, {"num_experts": "E"}),),
        function="moe_compute_expert_tokens",
        doc="ops-transformer moe/moe_compute_expert_tokens: infershape; "
        "docs/aclnnMoeComputeExpertTokens.md",
    )
)
