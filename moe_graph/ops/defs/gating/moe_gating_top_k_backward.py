"""MoeGatingTopKBackward: the gradient of a sigmoid router (``norm_type`` 1).

With ``w = x_norm[expert_idx]``, ``g = routed_scaling_factor * grad_y`` and ``S = sum(w) + eps``,

- ``dw = (g - sum(g * w) / S) / S``, sums over the k chosen experts;
- ``grad_x[expert_idx] = dw * w * (1 - w)``, 0 elsewhere.

fp32, rounded once to the dtype of grad_y.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.gating.norms import SIGMOID, divided_grad, scatter_to_experts
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.dims import known_less
from moe_graph.ops.limit import dim
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

MAX_EXPERTS = 2048


def _shapes(op: Call) -> Specs:
    rows, experts = op.dims("x_norm", rank=2)
    return [TensorSpec((rows, experts), op.grad_y.dtype)]


def _tiling(op: Call) -> None:
    rows, experts = op.dims("x_norm", rank=2)
    grad_rows, k = op.dims("grad_y", rank=2)
    id_rows, id_k = op.dims("expert_idx", rank=2)
    op.expect_equal("grad_y", grad_rows, rows, "dim 0")
    op.expect_equal("expert_idx", id_rows, rows, "dim 0")
    op.expect_equal("expert_idx", id_k, k, "dim 1")
    if known_less(experts, k):
        raise op.error("grad_y", got=f"k = {k}", want=f"<= {experts} experts")
    for name, size in (("x_norm", rows), ("grad_y", k)):
        if known_less(size, 1):
            raise op.error(name, got="an empty tensor", want="one row and one expert or more")
    op.expect_one_of("norm_type", (SIGMOID,))
    op.expect_one_of("renorm", (0, 1))


def _compute(op: Call) -> Tensors:
    check_range(op, "expert_idx", op.expert_idx, 0, op.x_norm.shape[1], "the experts")
    chosen = op.x_norm.gather(1, op.expert_idx.to(torch.int64))
    grad = divided_grad(op.grad_y.to(torch.float32) * op.routed_scaling_factor, chosen, op.eps)
    grad = grad * chosen * (1 - chosen)
    return [scatter_to_experts(op.x_norm, op.expert_idx, grad).to(op.grad_y.dtype)]


def _naive(op: Call) -> Tensors:
    check_range(op, "expert_idx", op.expert_idx, 0, op.x_norm.shape[1], "the experts")
    grad_x = torch.zeros(op.x_norm.shape, dtype=torch.float32)
    for row, experts in enumerate(op.expert_idx.tolist()):
        w = op.x_norm[row, experts]
        g = op.grad_y[row].float() * op.routed_scaling_factor
        total = w.sum() + op.eps
        dw = (g - (g * w).sum() / total) / total
        for place, expert in enumerate(experts):
            grad_x[row, expert] += dw[place] * w[place] * (1 - w[place])
    return [grad_x.to(op.grad_y.dtype)]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OPDEF = register(
    OpDef(
        ge_type="MoeGatingTopKBackward",
        inputs=(
            Input("x_norm", (torch.float32,)),
            Input("grad_y", _DTYPES),
            Input("expert_idx", (torch.int32,)),
        ),
        outputs=(Output("grad_x"),),
        attrs=(
            Attr("renorm", "Int", 0),
            Attr("norm_type", "Int", 0),
            Attr("routed_scaling_factor", "Float", 1.0),
            Attr("eps", "Float", 1e-20),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            Limit(
                "x_norm",
                "E",
                dim("x_norm", 1),
                "moe_gating_top_k_backward/docs/aclnnMoeGatingTopKBackward.md",
                low=1,
                high=MAX_EXPERTS,
            ),
        ),
        checked_outputs=("grad_x",),
        compute=_compute,
        naive=_naive,
        no_gradient="it is a gradient itself; a second derivative is not defined",
        products=(Soc.A2, Soc.A3),
        forms=(
            Form(
                "sigmoid",
                {"x_norm": "T E", "grad_y": "T K", "expert_idx": "T K"},
                {"norm_type": 1},
            ),
        ),
        doc="ops-transformer moe/moe_gating_top_k_backward: tiling and page",
    )
)
