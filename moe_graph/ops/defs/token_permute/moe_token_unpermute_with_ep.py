"""MoeTokenUnpermuteWithEp: MoeTokenUnpermute of the rows that one rank of expert parallelism holds.

``unpermuted_tokens[i]`` is the sum, k ascending, of
``permuted_tokens[sorted_indices[c] - start] * probs[i, k]`` over the copies ``c = i * topK + k``
whose place is in ``range = (start, end)``; rounding and skipping as in MoeTokenUnpermute. topK is
``probs.shape[1]``, or ``num_topk`` without probs. The range ``(0, 0)`` stands for all places.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute.dtypes import MIXED_PROBS, MIXED_ROWS
from moe_graph.ops.defs.token_permute.ep_range import check_ep_range, check_rows, window_of
from moe_graph.ops.defs.token_permute.sorting import (
    check_whole_tokens,
    probs_limit,
    refuse_padded_mode,
    size,
    top_k_limit,
)
from moe_graph.ops.defs.token_permute.sums import Sum
from moe_graph.ops.dims import floordiv, mul
from moe_graph.ops.opdef import (
    Attr,
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

_PAGE = "moe_token_unpermute_with_ep/docs/aclnnMoeTokenUnpermuteWithEp.md, constraints"


def _shapes(op: Call) -> Specs:
    op.expect_at_least("num_topk", 1)
    if op.probs is None:
        tokens = floordiv(size(op, "sorted_indices", 0), op.num_topk)
    else:
        tokens = size(op, "probs", 0)
    return [TensorSpec((tokens, size(op, "permuted_tokens", 1)), op.permuted_tokens.dtype)]


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    (copies,) = op.dims("sorted_indices", rank=1)
    check_ep_range(op, copies)
    check_rows(op, "permuted_tokens", op.dims("permuted_tokens", rank=2)[0])
    if op.probs is not None:
        op.expect_equal("sorted_indices", copies, mul(*op.dims("probs", rank=2)), "dim 0")
    else:
        check_whole_tokens(op, copies)


def _sum(op: Call) -> Sum:
    rows, place = op.permuted_tokens, op.sorted_indices
    check_range(op, "sorted_indices", place, 0, place.shape[0], "the copies")
    tokens, top_k = (
        (place.shape[0] // op.num_topk, op.num_topk) if op.probs is None else op.probs.shape
    )
    return Sum(rows, place, tokens, top_k, op.probs, window_of(op, rows.shape[0]))


def _compute(op: Call) -> Tensors:
    return [_sum(op).compute(op)]


def _naive(op: Call) -> Tensors:
    return [_sum(op).naive()]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermuteWithEp",
        inputs=(
            Input("permuted_tokens", MIXED_ROWS),
            Input("sorted_indices", (torch.int32,)),
            Input("probs", MIXED_PROBS, "optional"),
        ),
        outputs=(Output("unpermuted_tokens"),),
        attrs=(
            Attr("num_topk", "Int", 1),
            Attr("range", "ListInt", (0, 0)),
            Attr("padded_mode", "Bool", False),
            Attr("restore_shape", "ListInt", ()),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            top_k_limit("num_topk", _PAGE),
            probs_limit(_PAGE),
        ),
        compute=_compute,
        naive=_naive,
        no_gradient="MoeTokenUnpermuteWithEpGrad leaves rows beyond the range unwritten",
        forms=(
            Form(
                "rows 4 to 8, weighted",
                {"permuted_tokens": "4 H", "sorted_indices": "T*K", "probs": "T K"},
                {"range": (4, 8)},
            ),
            Form(
                "all rows, without probs",
                {"permuted_tokens": "T*K H", "sorted_indices": "T*K"},
                {"num_topk": "K"},
            ),
        ),
        products=(Soc.A2, Soc.A3),
        doc="ops-transformer moe/moe_token_unpermute_with_ep: infershape; "
        "docs/aclnnMoeTokenUnpermuteWithEp.md",
    )
)
