"""MoeGatingTopKSoftmax: the k largest of the softmax of each row of logits.

``y, expert_idx = topk(softmax(x), k)``; the softmax is taken in fp32 and rounded once. Of equal
scores the lower expert comes first. A row that is ``finished`` gets E for each of its expert ids.
``row_idx[i, j] = j * T + i`` numbers the copies k-major, as MoeInitRouting wants them.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.gating.softmax_gating import (
    FLOATS,
    check_finished,
    grad_of_logits,
    limits,
    save,
    select,
    select_naively,
    selected_shape,
)
from moe_graph.ops.opdef import (
    Attr,
    Autograd,
    Call,
    Form,
    Input,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    shape = selected_shape(op)
    return [TensorSpec(shape, dtype) for dtype in (op.x.dtype, torch.int32, torch.int32)]


def _row_idx(op: Call) -> torch.Tensor:
    shape = (*op.x.shape[:-1], op.k)
    tokens = op.x.shape[:-1].numel()
    row_idx = op.new_output(shape, torch.int32, op.x.device, 2)
    k_major = torch.arange(tokens * op.k, dtype=torch.int32, device=op.x.device)
    row_idx.view(tokens, op.k).copy_(k_major.view(op.k, tokens).t())
    return row_idx


def _compute(op: Call) -> Tensors:
    return [*select(op, renorm=False), _row_idx(op)]


def _naive(op: Call) -> Tensors:
    tokens = op.x.shape[:-1].numel()
    row_idx = [[j * tokens + i for j in range(op.k)] for i in range(tokens)]
    shape = (*op.x.shape[:-1], op.k)
    copies = torch.tensor(row_idx, dtype=torch.int32).reshape(shape)
    return [*select_naively(op, renorm=False), copies]


def _backward(
    ctx: Any, grad_y: torch.Tensor, *ids: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    return {"x": grad_of_logits(ctx, grad_y, renorm=False)}


OPDEF = register(
    OpDef(
        ge_type="MoeGatingTopKSoftmax",
        inputs=(Input("x", FLOATS), Input("finished", (torch.bool,), "optional")),
        outputs=(
            Output("y"),
            Output("expert_idx", dtype=torch.int32),
            Output("row_idx", dtype=torch.int32),
        ),
        attrs=(Attr("k", "Int"),),
        shape_rule=_shapes,
        tiling_rule=check_finished,
        limits=limits("moe_gating_top_k_softmax/docs/aclnnMoeGatingTopKSoftmax.md"),
        compute=_compute,
        naive=_naive,
        autograd=Autograd(save, _backward),
        forms=(
            Form("tokens", {"x": "T E"}, {"k": 2}),
            Form("batch", {"x": "B S E", "finished": "B S"}, {"k": 2}),
        ),
        function="moe_gating_top_k_softmax",
        doc="ops-transformer moe/moe_gating_top_k_softmax: infershape; "
        "docs/aclnnMoeGatingTopKSoftmax.md",
    )
)
