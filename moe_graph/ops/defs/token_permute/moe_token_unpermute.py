"""MoeTokenUnpermute: bring the rows of permuted tokens back to their tokens and add them up.

``unpermuted_tokens[i] = sum over k of permuted_tokens[r] * probs[i, k]`` with
``r = sorted_indices[i * topK + k]`` and ``topK = probs.shape[1]``; without probs topK is 1 and
every weight is 1. Products and sums are in fp32, k ascending, with one final rounding. Skipped are
indices beyond the rows, those that MoeTokenPermute left out, and probs of 0: a NaN in such a row
does not show.

On Ascend 950 MoeFinalizeRoutingV2 computes it, in its own order: there every index has a row, and a
prob of 0 is a factor like any other.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute import on_950
from moe_graph.ops.defs.token_permute.dtypes import MIXED_PROBS, MIXED_ROWS
from moe_graph.ops.defs.token_permute.row_gradients import leading_rows
from moe_graph.ops.defs.token_permute.sorting import probs_limit, refuse_padded_mode, size
from moe_graph.ops.defs.token_permute.sums import Sum
from moe_graph.ops.dims import may_equal, mul
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
    tokens = size(op, "sorted_indices" if op.probs is None else "probs", 0)
    return [TensorSpec((tokens, size(op, "permuted_tokens", 1)), op.permuted_tokens.dtype)]


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    rows, _ = op.dims("permuted_tokens", rank=2)
    (copies,) = op.dims("sorted_indices", rank=1)
    if op.probs is not None:
        op.expect_equal("sorted_indices", copies, mul(*op.dims("probs", rank=2)), "dim 0")
    if op.soc is Soc.ASCEND950 and not may_equal(rows, copies):
        raise op.error(
            "permuted_tokens",
            got=f"{rows} rows for {copies} indices",
            want="a row for every index",
            limit=True,
        )


def _sum(op: Call) -> Sum:
    rows, place = op.permuted_tokens, op.sorted_indices
    check_range(op, "sorted_indices", place, 0, max(place.shape[0], rows.shape[0]), "the copies")
    tokens, top_k = (place.shape[0], 1) if op.probs is None else op.probs.shape
    return Sum(rows, place, tokens, top_k, op.probs, (0, rows.shape[0]))


def _compute(op: Call) -> Tensors:
    if op.soc is Soc.ASCEND950:
        return on_950.compute(op, "kernel")
    return [_sum(op).compute(op)]


def _naive(op: Call) -> Tensors:
    if op.soc is Soc.ASCEND950:
        return on_950.compute(op, "reference")
    return [_sum(op).naive()]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(op.permuted_tokens, op.sorted_indices, op.probs)


def _backward(ctx: Any, grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
    permuted_tokens, sorted_indices, probs = ctx.saved_tensors
    rows_grad, probs_grad = torch.ops.moe_graph.moe_token_unpermute_grad(
        permuted_tokens, grad, sorted_indices, probs
    )
    return {
        "permuted_tokens": leading_rows(rows_grad, permuted_tokens.shape[0]),
        "probs": None if probs is None else probs_grad,
    }


OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermute",
        inputs=(
            Input("permuted_tokens", MIXED_ROWS),
            Input("sorted_indices", (torch.int32,)),
            Input("probs", MIXED_PROBS, "optional"),
        ),
        outputs=(Output("unpermuted_tokens"),),
        attrs=(Attr("padded_mode", "Bool", False), Attr("restore_shape", "ListInt", ())),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(probs_limit("moe_token_unpermute/docs/aclnnMoeTokenUnpermute.md, constraints"),),
        checked_outputs=("unpermuted_tokens",),
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        forms=(
            Form("weighted", {"permuted_tokens": "T*K H", "sorted_indices": "T*K", "probs": "T K"}),
            Form("without probs", {"permuted_tokens": "T H", "sorted_indices": "T"}),
        ),
        ge_products=(Soc.A2, Soc.A3),
        function="moe_token_unpermute",
        doc="ops-transformer moe/moe_token_unpermute: infershape, tiling, kernel",
    )
)
