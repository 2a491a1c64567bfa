"""MoeTokenPermuteWithEpGrad: gradients of the tokens and the probs of MoeTokenPermuteWithEp.

For every copy ``c = i * num_topk + k`` whose place ``sorted_indices[c]`` is in
``range = (start, end)``, with its row ``r = sorted_indices[c] - start``,

- ``token_grad[i]`` is the sum of the rows ``permuted_tokens_output_grad[r]`` in fp32, k ascending,
  rounded once;
- ``probs_grad[i, k] = permuted_probs_output_grad[r]``, where that is given; 0 for other copies.

JUL's infershape divides the rows by ``num_topk``, which is T only where a rank holds every row, and
gives no shape of ``probs_grad``; later ones take T from ``sorted_indices``, as here.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute.dtypes import FLOATS
from moe_graph.ops.defs.token_permute.ep_range import check_ep_range, check_rows, window_of
from moe_graph.ops.defs.token_permute.sorting import (
    check_whole_tokens,
    refuse_padded_mode,
    size,
    top_k_limit,
)
from moe_graph.ops.defs.token_permute.sums import Sum
from moe_graph.ops.dims import floordiv
from moe_graph.ops.opdef import Attr, Call, Form, Input, OpDef, Output, Specs, Tensors, TensorSpec
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    op.expect_at_least("num_topk", 1)
    rows, hidden = (size(op, "permuted_tokens_output_grad", at) for at in range(2))
    copies = size(op, "sorted_indices", 0)
    tokens = floordiv(rows if op.upstream else copies, op.num_topk)
    probs = op.permuted_probs_output_grad
    return [
        TensorSpec((tokens, hidden), op.permuted_tokens_output_grad.dtype),
        None if probs is None else TensorSpec((tokens, op.num_topk), probs.dtype),
    ]


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    (copies,) = op.dims("sorted_indices", rank=1)
    check_ep_range(op, copies)
    rows, _ = op.dims("permuted_tokens_output_grad", rank=2)
    check_rows(op, "permuted_tokens_output_grad", rows)
    check_whole_tokens(op, copies)
    if op.permuted_probs_output_grad is not None:
        (probs,) = op.dims("permuted_probs_output_grad", rank=1)
        op.expect_equal("permuted_probs_output_grad", probs, rows, "dim 0")


def _sum(op: Call) -> Sum:
    rows, place = op.permuted_tokens_output_grad, op.sorted_indices
    check_range(op, "sorted_indices", place, 0, place.shape[0], "the copies")
    window = window_of(op, rows.shape[0])
    return Sum(rows, place, place.shape[0] // op.num_topk, op.num_topk, None, window)


def _compute(op: Call) -> Tensors:
    found = _sum(op)
    probs: torch.Tensor | None = op.permuted_probs_output_grad
    if probs is None:
        return [found.compute(op), None]
    start, end = found.window
    held = (op.sorted_indices >= start) & (op.sorted_indices < end)
    probs_grad = probs.new_zeros(held.shape)
    probs_grad[held] = probs.index_select(0, op.sorted_indices[held] - start)
    return [found.compute(op), probs_grad.view(found.tokens, found.top_k)]


def _naive(op: Call) -> Tensors:
    found = _sum(op)
    probs = op.permuted_probs_output_grad
    if probs is None:
        return [found.naive(), None]
    start, end = found.window
    probs_grad = torch.zeros((found.tokens, found.top_k), dtype=probs.dtype)
    for copy, place in enumerate(op.sorted_indices.tolist()):
        if start <= place < end:
            probs_grad[copy // found.top_k, copy % found.top_k] = probs[place - start]
    return [found.naive(), probs_grad]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermuteWithEpGrad",
        inputs=(
            Input("permuted_tokens_output_grad", FLOATS),
            Input("sorted_indices", (torch.int32,)),
            Input("permuted_probs_output_grad", FLOATS, "optional"),
        ),
        outputs=(Output("token_grad"), Output("probs_grad")),
        attrs=(
            Attr("num_topk", "Int", 1),
            Attr("range", "ListInt", (0, 0)),
            Attr("padded_mode", "Bool", False),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(top_k_limit("num_topk", "moe_token_permute_with_ep_grad/README.md, constraints"),),
        compute=_compute,
        naive=_naive,
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "rows 4 to 8",
                {
                    "permuted_tokens_output_grad": "4 H",
                    "sorted_indices": "T*K",
                    "permuted_probs_output_grad": "4",
                },
                {"num_topk": "K", "range": (4, 8)},
            ),
        ),
        products=(Soc.A2, Soc.A3),
        doc="ops-transformer moe/moe_token_permute_with_ep_grad: infershape, README",
    )
)
