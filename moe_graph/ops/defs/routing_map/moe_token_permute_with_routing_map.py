"""MoeTokenPermuteWithRoutingMap: copy token rows into expert order, as a routing map says.

With T tokens and E experts, and ``n = num_out_tokens``:

- ``drop_and_pad=False``: ``topK = n // T``; row r is the r-th copy (t, e) of the map in expert
  order. ``permute_tokens[r] = tokens[t]``, ``permute_probs[r] = probs[t, e]``, and
  ``sorted_indices[t * topK + j]`` is the row of the j-th copy of token t. A token may have fewer
  copies than topK: its last slots are -1, and as many rows at the end stay unwritten. The page
  gives the formula for exactly topK; -1 is what the pages of the ops that read the slots say.
- ``drop_and_pad=True``: ``capacity = n // E``; the rows of expert e are its first `capacity`
  tokens, filled up with tokens that are not its own, both in ascending order.
  ``permute_tokens[r] = tokens[sorted_indices[r]]``.

The GE op takes the map and the probs transposed, ``[E, T]``, as the aclnn function hands them on.
Without probs ``permute_probs`` is there and stays unwritten.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.routing_map.moe_token_permute_with_routing_map_autograd import AUTOGRAD
from moe_graph.ops.defs.routing_map.routing_maps import (
    MAPS,
    MAX_SORTED,
    MAX_TOP_K,
    copies_of,
    mask_of,
    places_of_copies,
    places_of_rows,
    rows_of_tokens,
    whole,
)
from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.defs.support.poison import poison_, poisoned
from moe_graph.ops.dims import Dim, is_unknown, mul
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


def _shapes(op: Call) -> Specs:
    tokens, hidden = op.dims("tokens", rank=2)
    experts, map_tokens = op.dims("routing_map", rank=2)
    op.expect_equal("routing_map", map_tokens, tokens, "dim 1")
    if op.probs is not None:
        probs_experts, probs_tokens = op.dims("probs", rank=2)
        op.expect_equal("probs", probs_experts, experts, "dim 0")
        op.expect_equal("probs", probs_tokens, tokens, "dim 1")
    op.expect_at_least("num_out_tokens", 0)
    parts = experts if op.drop_and_pad else _either(tokens, map_tokens)
    rows = mul(whole(op.num_out_tokens, parts), parts)
    probs_dtype = (op.tokens if op.probs is None else op.probs).dtype
    written = () if op.drop_and_pad else (0,)  # fewer rows where tokens have fewer copies
    return [
        TensorSpec((rows, hidden), op.tokens.dtype, bounds=written),
        TensorSpec((rows,), probs_dtype, bounds=written),
        TensorSpec((rows,), torch.int32),
    ]


def _either(one: Dim, other: Dim) -> Dim:
    return other if is_unknown(one) else one


def _rows(op: Call) -> int:
    experts, tokens = op.routing_map.shape
    if op.num_out_tokens > experts * tokens:
        raise op.error(
            "num_out_tokens", got=op.num_out_tokens, want=f"<= T * E = {experts * tokens}"
        )
    parts = experts if op.drop_and_pad else tokens
    return int(whole(op.num_out_tokens, parts)) * int(parts)


def _compute(op: Call) -> Tensors:
    rows = _rows(op)
    mask = mask_of(op, "routing_map")
    experts, tokens = mask.shape
    if op.drop_and_pad:
        sorted_indices = token_of_row = _first_of_each_expert(mask, rows // max(experts, 1))
        places = places_of_rows(token_of_row, experts)
    else:
        places = places_of_copies(mask)
        token_of_row = torch.div(places, max(experts, 1), rounding_mode="floor").to(torch.int32)
        sorted_indices = _slots(op, token_of_row, tokens)
    filled = places.shape[0]
    probs_dtype = (op.tokens if op.probs is None else op.probs).dtype
    probs = poisoned((rows,), probs_dtype, op.tokens.device)
    if op.probs is not None:
        probs[:filled] = op.probs.t().reshape(-1).index_select(0, places)
    del places
    permuted = op.new_output((rows, op.tokens.shape[1]), op.tokens.dtype, op.tokens.device)
    gather_rows(op.tokens, token_of_row, permuted[:filled])
    poison_(permuted[filled:])
    return [permuted, probs, sorted_indices]


def _slots(op: Call, token_of_row: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the row of each slot ``t * topK + j``, -1 for an unused one.

    Raises:
        OpError: a token has more copies than slots.
    """
    top_k = int(whole(op.num_out_tokens, tokens))
    rows = rows_of_tokens(token_of_row, tokens)
    _check_copies(op, rows.shape[0], top_k)
    slots = torch.full((tokens, top_k), -1, dtype=torch.int32, device=rows.device)
    slots[:, : rows.shape[0]] = rows.t()
    return slots.view(-1)


def _check_copies(op: Call, most: int, top_k: int) -> None:
    if most > top_k:
        raise op.error(
            "routing_map",
            got=f"a token of {most} experts",
            want=f"at most num_out_tokens // T = {top_k}",
        )


def _first_of_each_expert(mask: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return ``[E * capacity]``: each expert's tokens, its own first, each kind ascending."""
    experts, tokens = mask.shape
    place = _places(mask.contiguous())
    kept = (place < capacity).view(-1).nonzero().view(-1)
    place += capacity * torch.arange(experts, dtype=torch.int32, device=mask.device).unsqueeze(1)
    row = place.view(-1).index_select(0, kept)
    del place
    token_of_row = torch.empty(experts * capacity, dtype=torch.int32, device=mask.device)
    token_of_row[row] = torch.remainder(kept, max(tokens, 1)).to(torch.int32)
    return token_of_row


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Return where a stable sort of each row, true before false, puts its elements."""
    own = mask.cumsum(1, dtype=torch.int32)
    others = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device) - own
    return torch.where(mask, own, others.add_(own[:, -1:])).sub_(1)


def _naive(op: Call) -> Tensors:
    rows = _rows(op)
    mask = mask_of(op, "routing_map")
    experts, tokens = mask.shape
    copies = []  # (token, expert) of each row
    if op.drop_and_pad:
        capacity = whole(op.num_out_tokens, experts)
        for e in range(experts):
            own = [t for t in range(tokens) if bool(mask[e, t])]
            others = [t for t in range(tokens) if not bool(mask[e, t])]
            copies += [(t, e) for t in (own + others)[:capacity]]
        sorted_indices = [t for t, _ in copies]
    else:
        copies = copies_of(mask.t())
        top_k = int(whole(op.num_out_tokens, tokens))
        sorted_indices = []
        for token in range(tokens):
            own = [row for row, (t, _) in enumerate(copies) if t == token]
            _check_copies(op, len(own), top_k)
            sorted_indices += own + [-1] * (top_k - len(own))
    permuted = torch.full((rows, op.tokens.shape[1]), torch.nan, dtype=op.tokens.dtype)
    probs_dtype = (op.tokens if op.probs is None else op.probs).dtype
    probs = torch.full((rows,), torch.nan, dtype=probs_dtype)
    for row, (t, e) in enumerate(copies):
        permuted[row] = op.tokens[t]
        if op.probs is not None:
            probs[row] = op.probs[e, t]
    return [permuted, probs, torch.tensor(sorted_indices, dtype=torch.int32)]


def _top_k(op: Any) -> Dim | None:
    tokens = dim("routing_map", 1)(op)
    return None if op.drop_and_pad else whole(op.num_out_tokens, tokens)


def _sorted(op: Any) -> Dim:
    tokens = dim("routing_map", 1)(op)
    return tokens if op.drop_and_pad else mul(whole(op.num_out_tokens, tokens), tokens)


_PAGE = "moe_token_permute_with_routing_map/docs/aclnnMoeTokenPermuteWithRoutingMap.md, constraints"
_TOKENS = (torch.bfloat16,) * 2 + (torch.float16,) * 2 + (torch.float32,) * 2
_ROWS = (*_TOKENS, torch.bfloat16, torch.bfloat16)
_PROBS = (*_TOKENS, torch.float32, torch.float32)

OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermuteWithRoutingMap",
        inputs=(
            Input("tokens", _ROWS),
            Input("routing_map", MAPS),
            Input("probs", _PROBS, "optional"),
        ),
        outputs=(
            Output("permute_tokens"),
            Output("permute_probs", required=False),
            Output("sorted_indices", dtype=torch.int32),
        ),
        attrs=(Attr("num_out_tokens", "Int"), Attr("drop_and_pad", "Bool", False)),
        shape_rule=_shapes,
        compute=_compute,
        naive=_naive,
        limits=(
            Limit("num_out_tokens", "num_out_tokens // T", _top_k, source=_PAGE, high=MAX_TOP_K),
            Limit(
                "routing_map",
                "indices to sort (T * topK; T with drop and pad)",
                _sorted,
                source=_PAGE,
                high=MAX_SORTED,
            ),
        ),
        checked_outputs=("permute_tokens", "permute_probs", "sorted_indices"),
        autograd=AUTOGRAD,
        forms=(
            Form(
                "dropless",
                {"tokens": "T H", "routing_map": "E T", "probs": "E T"},
                {"num_out_tokens": "n"},
            ),
            Form(
                "drop and pad",
                {"tokens": "T H", "routing_map": "E T", "probs": "E T"},
                {"num_out_tokens": "n", "drop_and_pad": True},
            ),
        ),
        function="moe_token_permute_with_routing_map",
        doc="ops-transformer moe/moe_token_permute_with_routing_map: tiling; "
        "docs/aclnnMoeTokenPermuteWithRoutingMap.md",
    )
)
