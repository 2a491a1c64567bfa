"""MoeGatingTopKSoftmaxV2: MoeGatingTopKSoftmax with the softmax before or after the selection.

| renorm | y, expert_idx                                         |
|--------|-------------------------------------------------------|
| 0      | ``topk(softmax(x), k)``                               |
| 1      | ``softmax(values), indices`` of ``topk(x, k)``        |

``softmax_result`` is the fp32 softmax of all logits where ``output_softmax_result_flag`` asks for
it and renorm is 0; otherwise it is empty. Rounding, ties and ``finished`` are as in the first
version.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.gating.norms import SOFTMAX, normalise_in_chunks
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


def _has_result(op: Any) -> bool:
    return bool(op.output_softmax_result_flag) and op.renorm == 0


def _shapes(op: Call) -> Specs:
    op.expect_one_of("renorm", (0, 1))
    shape = selected_shape(op)
    return [
        TensorSpec(shape, op.x.dtype),
        TensorSpec(shape, torch.int32),
        TensorSpec(op.x.shape if _has_result(op) else (0,), torch.float32),
    ]


def _compute(op: Call) -> Tensors:
    shape = op.x.shape if _has_result(op) else (0,)
    result = op.new_output(shape, torch.float32, op.x.device, 2)
    into = result if _has_result(op) else None
    return [*select(op, renorm=op.renorm == 1, scores_into=into), result]


def _naive(op: Call) -> Tensors:
    result = torch.empty(0)
    if _has_result(op):
        rows = op.x.reshape(-1, op.x.shape[-1])
        result = normalise_in_chunks(rows, SOFTMAX).view(op.x.shape)
    return [*select_naively(op, renorm=op.renorm == 1), result]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    save(ctx, op, outputs)
    ctx.renorm = op.renorm
    ctx.has_result = _has_result(op)


def _backward(
    ctx: Any,
    grad_y: torch.Tensor,
    grad_ids: torch.Tensor | None,
    grad_result: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    grad_scores = grad_result if ctx.has_result else None
    return {"x": grad_of_logits(ctx, grad_y, renorm=ctx.renorm == 1, grad_scores=grad_scores)}


OPDEF = register(
    OpDef(
        ge_type="MoeGatingTopKSoftmaxV2",
        inputs=(Input("x", FLOATS), Input("finished", (torch.bool,), "optional")),
        outputs=(
            Output("y"),
            Output("expert_idx", dtype=torch.int32),
            Output("softmax_result", required=False, dtype=torch.float32),
        ),
        attrs=(
            Attr("k", "Int"),
            Attr("renorm", "Int", 0),
            Attr("output_softmax_result_flag", "Bool", False),
        ),
        shape_rule=_shapes,
        tiling_rule=check_finished,
        limits=limits("moe_gating_top_k_softmax_v2/docs/aclnnMoeGatingTopKSoftmaxV2.md"),
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        forms=(
            Form("softmax first", {"x": "T E"}, {"k": 2, "output_softmax_result_flag": True}),
            Form("selection first", {"x": "T E", "finished": "T"}, {"k": 2, "renorm": 1}),
        ),
        function="moe_gating_top_k_softmax",
        doc="ops-transformer moe/moe_gating_top_k_softmax_v2: infershape; "
        "docs/aclnnMoeGatingTopKSoftmaxV2.md",
    )
)
