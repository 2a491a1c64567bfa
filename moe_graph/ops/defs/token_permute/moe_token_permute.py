"""MoeTokenPermute: bring the copies of tokens into the order of their indices.

With ``topK = indices.shape[1]`` (1 for indices in one dimension) and the stable ascending argsort
``s`` of all ``T * topK`` indices,

- ``sorted_indices[s[i]] = i`` for every i;
- ``permute_tokens[i] = tokens[s[i] // topK]`` for ``i < rows``, where
  ``rows = min(num_out_tokens, T * topK)`` for a positive ``num_out_tokens`` and
  ``max(T * topK + num_out_tokens, 0)`` otherwise.

Indices are sorted as fp32 on the device, so they must be in ``[0, 16777215)``. On Ascend 950 see
`on_950.py`; no arithmetic is involved, so the results are the same there.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute.gradient_of_tokens import gradient_of_tokens
from moe_graph.ops.defs.token_permute.on_950 import INT8_EXPERTS
from moe_graph.ops.defs.token_permute.row_gradients import has_all_rows
from moe_graph.ops.defs.token_permute.sorting import (
    END_OF_EXACT,
    check_permutes,
    copies_of,
    gather_tokens,
    naive_order,
    order_of,
    permuted,
    permuting_limits,
    top_k_of,
)
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown, minimum
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


def _rows(copies: Dim, num_out_tokens: int) -> Dim:
    if is_unknown(copies):
        return UNKNOWN
    if num_out_tokens > 0:
        return minimum(copies, num_out_tokens)
    # max(copies + num_out_tokens, 0), in terms of the rows that are left out.
    return copies - minimum(copies, -num_out_tokens) if num_out_tokens else copies


def _shapes(op: Call) -> Specs:
    copies = copies_of(op)
    rows = _rows(copies, op.num_out_tokens)
    return [permuted(op, rows), TensorSpec((copies,), torch.int32)]


def _check_indices(op: Call) -> None:
    end, why = END_OF_EXACT, "exact as fp32 sort keys"
    if op.soc is Soc.ASCEND950 and op.tokens.dtype is torch.int8:
        end, why = INT8_EXPERTS, "the experts of MoeInitRoutingV3, which serves int8 tokens"
    check_range(op, "indices", op.indices, 0, end, why)


def _compute(op: Call) -> Tensors:
    _check_indices(op)
    order, sorted_indices = order_of(op.indices)
    rows = _rows(order.shape[0], op.num_out_tokens)
    return [gather_tokens(op, order[:rows]), sorted_indices]


def _naive(op: Call) -> Tensors:
    _check_indices(op)
    order, sorted_indices = naive_order(op.indices)
    rows = _rows(len(order), op.num_out_tokens)
    output = torch.empty((rows, *op.tokens.shape[1:]), dtype=op.tokens.dtype)
    for row in range(rows):
        output[row] = op.tokens[order[row] // top_k_of(op.indices)]
    return [output, sorted_indices]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(outputs[1])
    ctx.top_k = 1 if op.indices.dim() == 1 else int(op.indices.shape[1])
    ctx.row_shape = op.tokens.shape[1:]
    ctx.keeps_all = op.num_out_tokens == 0


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> dict[str, torch.Tensor | None]:
    (sorted_indices,) = ctx.saved_tensors
    keeps_all = ctx.keeps_all or has_all_rows(grad, sorted_indices.shape[0])
    if len(ctx.row_shape) > 1:
        grad = grad.flatten(1)
    grad = gradient_of_tokens(grad, sorted_indices, ctx.top_k, keeps_all=keeps_all)
    if len(ctx.row_shape) > 1:
        grad = grad.unflatten(1, ctx.row_shape)
    return {"tokens": grad}


_INT = (torch.int64, torch.int32)

OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermute",
        inputs=(
            Input(
                "tokens",
                tuple(
                    dtype
                    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
                    for _ in _INT
                ),
            ),
            Input("indices", _INT * 4),
        ),
        outputs=(Output("permute_tokens"), Output("sorted_indices", dtype=torch.int32)),
        attrs=(Attr("num_out_tokens", "Int", 0), Attr("padded_mode", "Bool", False)),
        shape_rule=_shapes,
        tiling_rule=check_permutes,
        limits=permuting_limits("moe_token_permute/docs/aclnnMoeTokenPermute.md, constraints"),
        checked_outputs=("permute_tokens", "sorted_indices"),
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        forms=(
            Form("all rows", {"tokens": "T H", "indices": "T K"}),
            Form("one choice", {"tokens": "T H", "indices": "T"}),
            Form("first rows", {"tokens": "T H", "indices": "T K"}, {"num_out_tokens": "N"}),
        ),
        ge_products=(Soc.A2, Soc.A3),
        function="moe_token_permute",
        doc="ops-transformer moe/moe_token_permute: infershape, tiling, kernel; "
        "docs/aclnnMoeTokenPermute.md",
    )
)
