"""MoeTokenPermuteWithEp: the part of MoeTokenPermute that one rank of expert parallelism holds.

With ``sorted_indices`` as in MoeTokenPermute and ``range = (start, end)``, for every copy
``c = i * topK + k`` whose place is in the range,

- ``permute_tokens[sorted_indices[c] - start] = tokens[i]``;
- ``permute_probs[sorted_indices[c] - start] = probs[i, k]``, where there are probs.

The range ``(0, 0)`` stands for all places; ``num_out_tokens`` has no effect beside a range.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute.dtypes import INDEXED_ROWS, INDICES
from moe_graph.ops.defs.token_permute.ep_range import (
    check_ep_range,
    expect_pair,
    has_range,
    window_of,
)
from moe_graph.ops.defs.token_permute.sorting import (
    END_OF_EXACT,
    check_permutes,
    copies_of,
    gather_tokens,
    index_dims,
    naive_order,
    order_of,
    permuted,
    permuting_limits,
    top_k_of,
)
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown, minimum, mul
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, Tensors, TensorSpec
from moe_graph.ops.registry import register


def _rows(op: Call, copies: Dim) -> Dim:
    """Return the rows of the range; an empty or reversed one takes its size off the copies."""
    start, end = expect_pair(op)
    if is_unknown(copies):
        return UNKNOWN
    if start < end:
        return minimum(copies, end - start)
    return copies - minimum(copies, start - end) if start > end else copies


def _shapes(op: Call) -> Specs:
    copies = copies_of(op)
    tokens = permuted(op, _rows(op, copies))
    rows = tokens.shape[0] if tokens.rank_known else UNKNOWN
    probs = None if op.probs is None else TensorSpec((rows,), op.probs.dtype)
    return [tokens, TensorSpec((copies,), torch.int32), probs]


def _tiling(op: Call) -> None:
    check_permutes(op)
    check_ep_range(op, mul(*index_dims(op)))
    if not has_range(op) and op.num_out_tokens != 0:
        raise op.error(
            "num_out_tokens",
            got=op.num_out_tokens,
            want="0 without a range",
            hint="give range=(0, num_out_tokens), or use MoeTokenPermute",
        )
    if op.probs is not None and op.probs.rank_known and op.indices.rank_known:
        wanted = op.indices.shape
        if len(op.probs.shape) != len(wanted):
            raise op.error("probs", got=op.probs, want=f"{len(wanted)} dimensions, as indices has")
        for at, (got, want) in enumerate(zip(op.probs.shape, wanted, strict=True)):
            op.expect_equal("probs", got, want, f"dim {at}")


def _check_values(op: Call) -> None:
    check_range(op, "indices", op.indices, 0, END_OF_EXACT, "exact as fp32 sort keys")
    check_ep_range(op, op.indices.numel())


def _compute(op: Call) -> Tensors:
    _check_values(op)
    order, sorted_indices = order_of(op.indices)
    start, end = window_of(op, order.shape[0])
    held = order[start:end]
    probs = None if op.probs is None else op.probs.reshape(-1).index_select(0, held)
    return [gather_tokens(op, held), sorted_indices, probs]


def _naive(op: Call) -> Tensors:
    _check_values(op)
    _, sorted_indices = naive_order(op.indices)
    start, end = window_of(op, sorted_indices.shape[0])
    tokens = torch.empty((end - start, *op.tokens.shape[1:]), dtype=op.tokens.dtype)
    probs = None if op.probs is None else torch.empty(end - start, dtype=op.probs.dtype)
    for copy, place in enumerate(sorted_indices.tolist()):
        if not start <= place < end:
            continue
        tokens[place - start] = op.tokens[copy // top_k_of(op.indices)]
        if probs is not None:
            probs[place - start] = op.probs.reshape(-1)[copy]
    return [tokens, sorted_indices, probs]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermuteWithEp",
        inputs=(
            Input("tokens", INDEXED_ROWS),
            Input("indices", INDICES),
            Input("probs", INDEXED_ROWS, "optional"),
        ),
        outputs=(
            Output("permute_tokens"),
            Output("sorted_indices", dtype=torch.int32),
            Output("permute_probs"),
        ),
        attrs=(
            Attr("range", "ListInt", (0, 0)),
            Attr("num_out_tokens", "Int", 0),
            Attr("padded_mode", "Bool", False),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=permuting_limits("moe_token_permute_with_ep/docs/aclnnMoeTokenPermuteWithEp.md"),
        compute=_compute,
        naive=_naive,
        no_gradient="GE sizes the gradient of the tokens by the rows of the range",
        forms=(
            Form("all rows", {"tokens": "T H", "indices": "T K", "probs": "T K"}),
            Form("rows 4 to 8", {"tokens": "T H", "indices": "T K"}, {"range": (4, 8)}),
        ),
        products=(Soc.A2, Soc.A3),
        doc="ops-transformer moe/moe_token_permute_with_ep: infershape; "
        "docs/aclnnMoeTokenPermuteWithEp.md",
    )
)
