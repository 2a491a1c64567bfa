"""MoeTokenUnpermuteWithRoutingMap: add the rows of each token up again, weighted by its probs.

- ``drop_and_pad=False``: ``topK = R // T`` for R rows of ``permuted_tokens``;
  ``unpermuted_tokens[t] = sum over j of permuted_tokens[r] * permute_probs[r]`` with
  ``r = sorted_indices[t * topK + j]``, without the slots that are -1. ``permute_probs`` are the
  probs of the copies in expert order; rows of no copy, ``out_index`` and ``permute_token_id`` stay
  unwritten.
- ``drop_and_pad=True``: ``sorted_indices[r]`` is the token of row r, ``capacity = N // E`` for N
  indices, ``permute_probs[r] = probs[sorted_indices[r], r // capacity]``.
  ``permute_token_id, out_index`` is the stable sort of ``sorted_indices``;
  ``unpermuted_tokens[permute_token_id[i]] += permuted_tokens[out_index[i]] * permute_probs[...]``.

Without probs every weight is 1 and ``permute_probs`` is left out; T then comes from
``restore_shape``. Products and sums are in fp32 with one final rounding, in the order of the slots
or rows: the deterministic mode of the device.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.routing_map.routing_maps import (
    MAPS,
    MAX_TOP_K,
    UNPERMUTE_PROBS,
    UNPERMUTE_ROWS,
    check_whole,
    copies_of,
    mask_of,
    places_of_copies,
    places_of_rows,
    rows_of_tokens,
    sum_rows,
    whole,
)
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.poison import poisoned
from moe_graph.ops.dims import Dim
from moe_graph.ops.limit import dim
from moe_graph.ops.opdef import (
    Attr,
    Autograd,
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
    _, hidden = op.dims("permuted_tokens", rank=2)
    (slots,) = op.dims("sorted_indices", rank=1)
    if op.restore_shape and len(op.restore_shape) != 2:
        raise op.error("restore_shape", got=op.restore_shape, want="2 sizes, [T, H]")
    if op.probs is not None:
        tokens, _ = op.dims("probs", rank=2)
    elif op.restore_shape:
        tokens = op.restore_shape[0]
    else:
        raise op.error("restore_shape", got="nothing", want="[T, H], since there are no probs")
    if op.restore_shape:
        op.expect_equal("restore_shape", op.restore_shape[0], tokens, "size 0")
        op.expect_equal("restore_shape", op.restore_shape[1], hidden, "size 1")
    index = TensorSpec((slots,), torch.int32)
    written = () if op.drop_and_pad else (0,)  # fewer rows where tokens have fewer copies
    probs = None if op.probs is None else TensorSpec((slots,), op.probs.dtype, bounds=written)
    return [TensorSpec((tokens, hidden), op.permuted_tokens.dtype), index, index, probs]


def _tiling(op: Call) -> None:
    if op.drop_and_pad:
        return
    rows, _ = op.dims("permuted_tokens", rank=2)
    (slots,) = op.dims("sorted_indices", rank=1)
    op.expect_equal("sorted_indices", slots, rows, "dim 0")
    if op.probs is None:
        return
    if op.routing_map is None:
        raise op.error("routing_map", got="nothing", want="a tensor, since probs is given")
    tokens, experts = op.dims("probs", rank=2)
    map_tokens, map_experts = op.dims("routing_map", rank=2)
    op.expect_equal("routing_map", map_tokens, tokens, "dim 0")
    op.expect_equal("routing_map", map_experts, experts, "dim 1")


def _tokens(op: Call) -> int:
    return int(op.restore_shape[0] if op.probs is None else op.probs.shape[0])


def _check(op: Call) -> None:
    indices, tokens = op.sorted_indices, _tokens(op)
    rows, slots = op.permuted_tokens.shape[0], indices.shape[0]
    if not op.drop_and_pad:
        check_range(op, "sorted_indices", indices, -1, rows, "the rows, or -1")
        check_whole(op, "sorted_indices", slots, tokens, "T")
        return
    check_range(op, "sorted_indices", indices, 0, tokens, "the tokens")
    if slots > rows:
        raise op.error("sorted_indices", got=f"{slots} indices", want=f"at most {rows} rows")
    if op.probs is not None:
        check_whole(op, "sorted_indices", slots, op.probs.shape[1], "E")


def _check_copies(op: Call, copies: int) -> None:
    rows = op.sorted_indices.shape[0]
    if copies > rows:
        raise op.error("routing_map", got=f"{copies} copies", want=f"at most {rows}")


def _compute(op: Call) -> Tensors:
    _check(op)
    tokens, slots = _tokens(op), op.sorted_indices
    if op.drop_and_pad:
        permute_token_id, out_index = torch.sort(slots, stable=True)
        out_index = out_index.to(torch.int32)
        rows = rows_of_tokens(slots, tokens)
    else:
        permute_token_id, out_index = (
            poisoned(slots.shape, torch.int32, slots.device) for _ in range(2)
        )
        top_k = whole(slots.shape[0], tokens)
        rows = slots.view(tokens, top_k).t().contiguous()
    probs = None if op.probs is None else _permute_probs(op)
    hidden = op.permuted_tokens.shape[1]
    output = op.new_output((tokens, hidden), op.permuted_tokens.dtype, op.permuted_tokens.device)
    sum_rows(op.permuted_tokens, rows, probs, output)
    return [output, out_index, permute_token_id, probs]


def _permute_probs(op: Call) -> torch.Tensor:
    """Return the probs of the rows: NaN for a row of no copy."""
    if op.drop_and_pad:
        places = places_of_rows(op.sorted_indices, op.probs.shape[1])
    else:
        places = places_of_copies(mask_of(op, "routing_map").t())
        _check_copies(op, places.shape[0])
    probs = poisoned(op.sorted_indices.shape, op.probs.dtype, op.probs.device)
    probs[: places.shape[0]] = op.probs.reshape(-1).index_select(0, places)
    return probs


def _naive(op: Call) -> Tensors:
    _check(op)
    tokens, indices = _tokens(op), op.sorted_indices.tolist()
    slots = len(indices)
    probs = None
    if op.probs is not None:
        probs = torch.full((slots,), torch.nan, dtype=op.probs.dtype)
        if op.drop_and_pad:
            copies = [(t, r // (slots // op.probs.shape[1])) for r, t in enumerate(indices)]
        else:
            copies = copies_of(mask_of(op, "routing_map"))
            _check_copies(op, len(copies))
        for row, (t, e) in enumerate(copies):
            probs[row] = op.probs[t, e]
    hidden = op.permuted_tokens.shape[1]
    output = torch.empty((tokens, hidden), dtype=op.permuted_tokens.dtype)
    for t in range(tokens):
        if op.drop_and_pad:
            rows = [row for row, token in enumerate(indices) if token == t]
        else:
            top_k = slots // tokens
            rows = [row for row in indices[t * top_k : (t + 1) * top_k] if row >= 0]
        total = torch.zeros(hidden, dtype=torch.float32)
        for row in rows:
            part = op.permuted_tokens[row].to(torch.float32)
            total = total + (part if probs is None else part * probs[row].to(torch.float32))
        output[t] = total
    if op.drop_and_pad:
        by_token = sorted(range(slots), key=lambda row: indices[row])
        out_index = torch.tensor(by_token, dtype=torch.int32)
        token_id = torch.tensor([indices[row] for row in by_token], dtype=torch.int32)
    else:
        out_index, token_id = (
            poisoned((slots,), torch.int32, op.sorted_indices.device) for _ in range(2)
        )
    return [output, out_index, token_id, probs]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    has_probs = op.probs is not None
    pair = outputs[1:3] if op.drop_and_pad else (op.sorted_indices, op.sorted_indices)
    ctx.save_for_backward(
        *pair,
        op.routing_map if has_probs else None,
        op.permuted_tokens if has_probs else None,
        op.probs,
    )
    ctx.drop_and_pad = op.drop_and_pad


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> dict[str, torch.Tensor | None]:
    out_index, token_id, routing_map, permuted_tokens, probs = ctx.saved_tensors
    of_tokens, of_probs = torch.ops.moe_graph.moe_token_unpermute_with_routing_map_grad(
        grad, out_index, token_id, routing_map, permuted_tokens, probs, ctx.drop_and_pad
    )
    return {"permuted_tokens": of_tokens, "probs": None if probs is None else of_probs}


def _top_k(op: Any) -> Dim | None:
    if op.drop_and_pad:
        return None
    tokens = op.restore_shape[0] if op.probs is None else dim("probs", 0)(op)
    return whole(dim("permuted_tokens", 0)(op), tokens)


_PAGE = "moe_token_unpermute_with_routing_map/docs/aclnnMoeTokenUnpermuteWithRoutingMap.md"

OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermuteWithRoutingMap",
        inputs=(
            Input("permuted_tokens", UNPERMUTE_ROWS),
            Input("sorted_indices", (torch.int32,)),
            Input("routing_map", MAPS, "optional"),
            Input("probs", UNPERMUTE_PROBS, "optional"),
        ),
        outputs=(
            Output("unpermuted_tokens"),
            Output("out_index", dtype=torch.int32),
            Output("permute_token_id", dtype=torch.int32),
            Output("permute_probs", required=False),
        ),
        attrs=(Attr("drop_and_pad", "Bool", False), Attr("restore_shape", "ListInt", ())),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        limits=(Limit("permuted_tokens", "topK (R // T)", _top_k, source=_PAGE, high=MAX_TOP_K),),
        autograd=Autograd(_save, _backward),
        forms=(
            Form(
                "dropless",
                {
                    "permuted_tokens": "T*K H",
                    "sorted_indices": "T*K",
                    "routing_map": "T E",
                    "probs": "T E",
                },
            ),
            Form(
                "drop and pad",
                {"permuted_tokens": "E*C H", "sorted_indices": "E*C", "probs": "T E"},
                {"drop_and_pad": True},
            ),
        ),
        function="moe_token_unpermute_with_routing_map",
        doc="ops-transformer moe/moe_token_unpermute_with_routing_map: tiling; "
        "docs/aclnnMoeTokenUnpermuteWithRoutingMap.md",
    )
)
