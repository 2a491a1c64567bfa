"""MoeTokenUnpermuteWithEpGrad: gradients of MoeTokenUnpermuteWithEp.

As MoeTokenUnpermuteGrad, with rows ``r = sorted_indices[c] - start`` for the places in
``range = (start, end)`` only; other copies have no row, and their probs have gradient 0. (The page
subtracts ``start`` in the formulas of the forward and without probs, and not with probs; the row
that the forward has read is the one whose gradient it is.) topK is ``probs.shape[1]``, or
``topk_num`` without probs. The range ``(-1, -1)`` stands for all places.

GE makes ``permuted_tokens_grad`` as long as ``sorted_indices``; rows beyond the range stay
unwritten.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.token_permute.dtypes import MIXED_PROBS, MIXED_ROWS
from moe_graph.ops.defs.token_permute.ep_range import check_ep_range, check_rows, has_range
from moe_graph.ops.defs.token_permute.row_gradients import RowGradients
from moe_graph.ops.defs.token_permute.sorting import probs_limit, refuse_padded_mode, top_k_limit
from moe_graph.ops.defs.token_permute.unpermute_grad_shapes import (
    check_unpermute_grad,
    unpermute_grad_shapes,
)
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Tensors
from moe_graph.ops.registry import register

_PAGE = "moe_token_unpermute_with_ep_grad/docs/aclnnMoeTokenUnpermuteWithEpGrad.md, constraints"


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    check_unpermute_grad(op, top_k=op.topk_num)
    check_ep_range(op, op.dims("sorted_indices", rank=1)[0])
    if op.permuted_tokens is not None:
        check_rows(op, "permuted_tokens", op.dims("permuted_tokens", rank=2)[0])


def _gradients(op: Call) -> RowGradients:
    return RowGradients.of(op, op.topk_num, op.range if has_range(op) else None)


def _compute(op: Call) -> Tensors:
    return [*_gradients(op).compute(op)]


def _naive(op: Call) -> Tensors:
    return [*_gradients(op).naive()]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermuteWithEpGrad",
        inputs=(
            Input("unpermuted_tokens_grad", MIXED_ROWS),
            Input("sorted_indices", (torch.int32,)),
            Input("permuted_tokens", MIXED_ROWS, "optional"),
            Input("probs", MIXED_PROBS, "optional"),
        ),
        outputs=(Output("permuted_tokens_grad"), Output("probs_grad")),
        attrs=(
            Attr("padded_mode", "Bool", False),
            Attr("restore_shape", "ListInt", (1, 1)),
            Attr("range", "ListInt", (-1, -1)),
            Attr("topk_num", "Int", 1),
        ),
        shape_rule=unpermute_grad_shapes,
        tiling_rule=_tiling,
        limits=(
            top_k_limit("topk_num", _PAGE),
            probs_limit(_PAGE),
        ),
        compute=_compute,
        naive=_naive,
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "rows 4 to 8, weighted",
                {
                    "unpermuted_tokens_grad": "T H",
                    "sorted_indices": "T*K",
                    "permuted_tokens": "4 H",
                    "probs": "T K",
                },
                {"range": (4, 8)},
            ),
        ),
        products=(Soc.A2, Soc.A3),
        doc="ops-transformer moe/moe_token_unpermute_with_ep_grad: infershape; "
        "docs/aclnnMoeTokenUnpermuteWithEpGrad.md",
    )
)
