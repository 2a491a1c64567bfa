"""MoeTokenUnpermuteGrad: gradient of the rows and the probs of MoeTokenUnpermute.

With copy ``c = i * topK + k`` of token i and its row ``r = sorted_indices[c]``,

- ``permuted_tokens_grad[r] = unpermuted_tokens_grad[i] * probs[i, k]``;
- ``probs_grad[i, k] = sum over h of permuted_tokens[r, h] * unpermuted_tokens_grad[i, h]``.

Both are computed in fp32 and rounded once. topK is ``probs.shape[1]``; without probs it is 1, every
weight is 1, and there is no ``probs_grad``. GE makes ``permuted_tokens_grad`` as long as
``sorted_indices``: where MoeTokenPermute left rows out, the rows beyond those of
``permuted_tokens`` stay unwritten, and the prob of a copy without a row has gradient 0.

No sum runs over k, so the results are the same on Ascend 950, where MoeFinalizeRoutingV2Grad serves
graphs.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.token_permute.dtypes import MIXED_PROBS, MIXED_ROWS
from moe_graph.ops.defs.token_permute.row_gradients import RowGradients
from moe_graph.ops.defs.token_permute.sorting import probs_limit, refuse_padded_mode
from moe_graph.ops.defs.token_permute.unpermute_grad_shapes import (
    check_unpermute_grad,
    unpermute_grad_shapes,
)
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Tensors
from moe_graph.ops.registry import register


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    check_unpermute_grad(op)


def _compute(op: Call) -> Tensors:
    return [*RowGradients.of(op, top_k=1).compute(op)]


def _naive(op: Call) -> Tensors:
    return [*RowGradients.of(op, top_k=1).naive()]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermuteGrad",
        inputs=(
            Input("permuted_tokens", MIXED_ROWS, "optional"),
            Input("unpermuted_tokens_grad", MIXED_ROWS),
            Input("sorted_indices", (torch.int32,)),
            Input("probs", MIXED_PROBS, "optional"),
        ),
        outputs=(Output("permuted_tokens_grad"), Output("probs_grad")),
        attrs=(Attr("padded_mode", "Bool", False), Attr("restore_shape", "ListInt", (1, 1))),
        shape_rule=unpermute_grad_shapes,
        tiling_rule=_tiling,
        limits=(
            probs_limit("moe_token_unpermute_grad/docs/aclnnMoeTokenUnpermuteGrad.md, constraints"),
        ),
        checked_outputs=("permuted_tokens_grad", "probs_grad"),
        compute=_compute,
        naive=_naive,
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "weighted",
                {
                    "permuted_tokens": "T*K H",
                    "unpermuted_tokens_grad": "T H",
                    "sorted_indices": "T*K",
                    "probs": "T K",
                },
            ),
            Form("without probs", {"unpermuted_tokens_grad": "T H", "sorted_indices": "T"}),
        ),
        ge_products=(Soc.A2, Soc.A3),
        function="moe_token_unpermute_grad",
        doc="ops-transformer moe/moe_token_unpermute_grad: infershape, tiling, kernel",
    )
)
