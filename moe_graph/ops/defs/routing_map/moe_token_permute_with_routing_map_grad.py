"""MoeTokenPermuteWithRoutingMapGrad: gradient of MoeTokenPermuteWithRoutingMap.

With R rows of gradient, T = ``tokens_num`` and E = ``num_experts``:

- ``padded_mode=False``: ``topK = R // T``; ``tokens_grad[t]`` sums the rows
  ``sorted_indices[t * topK + j]`` over j, without the slots that are -1. ``probs_grad[t, e]`` is
  that of the row of copy (t, e), 0 for no copy.
- ``padded_mode=True``: ``capacity = R // E``; ``tokens_grad[t]`` sums the rows r with
  ``sorted_indices[r] == t``, ascending. ``probs_grad[sorted_indices[r], r // capacity]`` is that of
  row r, 0 elsewhere.

Sums are in fp32 with one final rounding, in the order of the slots or rows: the deterministic mode
of the device. The map is ``[T, E]`` here. The page says that the gradient of the probs is too; GE's
infershape says ``[T, R // T]``, which `upstream` gives.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.routing_map.routing_maps import (
    MAX_TOP_K,
    check_whole,
    copies_of,
    mask_of,
    places_of_copies,
    places_of_rows,
    rows_of_tokens,
    spread,
    sum_rows,
    whole,
)
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.dims import Dim
from moe_graph.ops.limit import attribute, dim
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


def _shapes(op: Call) -> Specs:
    rows, hidden = op.dims("permuted_token_output_grad", rank=2)
    tokens_grad = TensorSpec((op.tokens_num, hidden), op.permuted_token_output_grad.dtype)
    if op.permuted_probs_output_grad_optional is None:
        return [tokens_grad, None]
    second = whole(rows, op.tokens_num) if op.upstream else op.num_experts
    probs_dtype = op.permuted_probs_output_grad_optional.dtype
    return [tokens_grad, TensorSpec((op.tokens_num, second), probs_dtype)]


def _tiling(op: Call) -> None:
    rows, _ = op.dims("permuted_token_output_grad", rank=2)
    (slots,) = op.dims("sorted_indices", rank=1)
    op.expect_equal("sorted_indices", slots, rows, "dim 0")
    if op.permuted_probs_output_grad_optional is None:
        return
    (of_probs,) = op.dims("permuted_probs_output_grad_optional", rank=1)
    op.expect_equal("permuted_probs_output_grad_optional", of_probs, rows, "dim 0")
    if op.padded_mode:
        return
    if op.routing_map_optional is None:
        raise op.error(
            "routing_map_optional",
            got="nothing",
            want="a tensor, since permuted_probs_output_grad_optional is given",
        )
    tokens, experts = op.dims("routing_map_optional", rank=2)
    op.expect_equal("routing_map_optional", tokens, op.tokens_num, "dim 0")
    op.expect_equal("routing_map_optional", experts, op.num_experts, "dim 1")


def _check(op: Call) -> None:
    rows, argument = op.permuted_token_output_grad.shape[0], "permuted_token_output_grad"
    if op.padded_mode:
        check_range(op, "sorted_indices", op.sorted_indices, 0, op.tokens_num, "the tokens")
        check_whole(op, argument, rows, op.num_experts, "num_experts")
    else:
        check_range(op, "sorted_indices", op.sorted_indices, -1, rows, "the rows, or -1")
        check_whole(op, argument, rows, op.tokens_num, "tokens_num")


def _compute(op: Call) -> Tensors:
    _check(op)
    grad = op.permuted_token_output_grad
    tokens = op.tokens_num
    if op.padded_mode:
        rows = rows_of_tokens(op.sorted_indices, tokens)
    else:
        rows = op.sorted_indices.view(tokens, -1).t().contiguous()
    output = op.new_output((tokens, grad.shape[1]), grad.dtype, grad.device)
    sum_rows(grad, rows, None, output)
    if op.permuted_probs_output_grad_optional is None:
        return [output, None]
    return [output, _probs_grad(op)]


def _probs_grad(op: Call) -> torch.Tensor:
    if op.padded_mode:
        places = places_of_rows(op.sorted_indices, op.num_experts)
    else:
        places = places_of_copies(mask_of(op, "routing_map_optional").t())
        _check_rows(op, places.shape[0])
    shape = (op.tokens_num, op.num_experts)
    return spread(op.permuted_probs_output_grad_optional, places, shape)


def _check_rows(op: Call, copies: int) -> None:
    rows = op.permuted_token_output_grad.shape[0]
    if copies > rows:
        raise op.error("routing_map_optional", got=f"{copies} copies", want=f"at most {rows} rows")


def _naive(op: Call) -> Tensors:
    _check(op)
    grad, indices = op.permuted_token_output_grad, op.sorted_indices.tolist()
    tokens, experts = op.tokens_num, op.num_experts
    output = torch.empty((tokens, grad.shape[1]), dtype=grad.dtype)
    top_k = len(indices) // tokens
    for t in range(tokens):
        if op.padded_mode:
            rows = [row for row, token in enumerate(indices) if token == t]
        else:
            rows = [row for row in indices[t * top_k : (t + 1) * top_k] if row >= 0]
        total = torch.zeros(grad.shape[1], dtype=torch.float32)
        for row in rows:
            total = total + grad[row].to(torch.float32)
        output[t] = total
    of_rows = op.permuted_probs_output_grad_optional
    if of_rows is None:
        return [output, None]
    probs_grad = torch.zeros((tokens, experts), dtype=of_rows.dtype)
    if op.padded_mode:
        capacity = len(indices) // experts
        for row, token in enumerate(indices):
            probs_grad[token, row // capacity] = of_rows[row]
    else:
        copies = copies_of(mask_of(op, "routing_map_optional"))
        _check_rows(op, len(copies))
        for row, (t, e) in enumerate(copies):
            probs_grad[t, e] = of_rows[row]
    return [output, probs_grad]


def _top_k(op: Any) -> Dim | None:
    if op.padded_mode:
        return None
    return whole(dim("permuted_token_output_grad", 0)(op), op.tokens_num)


_PAGE = "moe_token_permute_with_routing_map_grad/docs/aclnnMoeTokenPermuteWithRoutingMapGrad.md"
_ROWS = (torch.bfloat16, torch.float16, torch.float32) * 2 + (torch.bfloat16,) * 2
_PROBS = (torch.bfloat16, torch.float16, torch.float32) * 2 + (torch.float32,) * 2
_MAPS = (torch.int8,) * 3 + (torch.bool,) * 3 + (torch.int8, torch.bool)

OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermuteWithRoutingMapGrad",
        inputs=(
            Input("permuted_token_output_grad", _ROWS),
            Input("permuted_probs_output_grad_optional", _PROBS, "optional"),
            Input("sorted_indices", (torch.int32,)),
            Input("routing_map_optional", _MAPS, "optional"),
        ),
        outputs=(Output("tokens_grad_out"), Output("probs_grad_out_optional", required=False)),
        attrs=(
            Attr("num_experts", "Int"),
            Attr("tokens_num", "Int"),
            Attr("padded_mode", "Bool", False),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        limits=(
            Limit("num_experts", "num_experts", attribute("num_experts"), source=_PAGE, low=1),
            Limit("tokens_num", "tokens_num", attribute("tokens_num"), source=_PAGE, low=1),
            Limit("tokens_num", "topK (R // T)", _top_k, source=_PAGE, high=MAX_TOP_K),
        ),
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "dropless",
                {
                    "permuted_token_output_grad": "T*K H",
                    "permuted_probs_output_grad_optional": "T*K",
                    "sorted_indices": "T*K",
                    "routing_map_optional": "T E",
                },
                {"num_experts": "E", "tokens_num": "T"},
            ),
            Form(
                "drop and pad",
                {
                    "permuted_token_output_grad": "E*C H",
                    "permuted_probs_output_grad_optional": "E*C",
                    "sorted_indices": "E*C",
                },
                {"num_experts": "E", "tokens_num": "T", "padded_mode": True},
            ),
        ),
        function="moe_token_permute_with_routing_map_grad",
        doc="ops-transformer moe/moe_token_permute_with_routing_map_grad: infershape, tiling; "
        "docs/aclnnMoeTokenPermuteWithRoutingMapGrad.md",
    )
)
