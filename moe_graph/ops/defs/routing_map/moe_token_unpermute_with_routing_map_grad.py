"""MoeTokenUnpermuteWithRoutingMapGrad: gradient of MoeTokenUnpermuteWithRoutingMap.

Row ``r = out_index[i]`` belongs to token t:

- ``drop_and_pad=False``: ``t = i // topK`` with ``topK = N // T`` for N indices; a slot with
  ``out_index`` -1 has no row. ``out_index`` is the ``sorted_indices`` of the forward, and
  ``permute_token_id`` is not read: torch_npu passes ``sorted_indices`` for it too. The row of copy
  (t, e) is its number in expert order.
- ``drop_and_pad=True``: ``t = permute_token_id[i]`` and ``e = r // capacity``.

Then ``permuted_tokens_grad[r] = unpermuted_tokens_grad[t] * probs[t, e]`` and
``probs_grad[t, e] = sum over h of unpermuted_tokens_grad[t, h] * permuted_tokens[r, h]``, 0 for no
copy; products and sums in fp32, rounded once. Without probs the weight is 1. Rows without a copy
stay unwritten.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.routing_map.routing_maps import (
    MAPS,
    UNPERMUTE_PROBS,
    UNPERMUTE_ROWS,
    check_whole,
    copies_of,
    mask_of,
    places_of_copies,
    places_of_rows,
    spread,
    whole,
)
from moe_graph.ops.defs.routing_map.unpermute_grad_limits import LIMITS
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import Dim, known_less
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


def _shapes(op: Call) -> Specs:
    _, hidden = op.dims("unpermuted_tokens_grad", rank=2)
    (slots,) = op.dims("out_index", rank=1)
    written = () if op.drop_and_pad else (0,)  # fewer rows where tokens have fewer copies
    of_tokens = TensorSpec((slots, hidden), op.unpermuted_tokens_grad.dtype, bounds=written)
    if op.probs is None:
        return [of_tokens, None]
    return [of_tokens, TensorSpec(op.dims("probs", rank=2), op.probs.dtype)]


def _tiling(op: Call) -> None:
    tokens, hidden = op.dims("unpermuted_tokens_grad", rank=2)
    (slots,) = op.dims("out_index", rank=1)
    (ids,) = op.dims("permute_token_id", rank=1)
    op.expect_equal("permute_token_id", ids, slots, "dim 0")
    if op.probs is None:
        return
    for name in ("routing_map", "permuted_tokens"):
        if getattr(op, name) is None:
            raise op.error(name, got="nothing", want="a tensor, since probs is given")
    rows, width = op.dims("permuted_tokens", rank=2)
    op.expect_equal("permuted_tokens", rows, slots, "dim 0")
    op.expect_equal("permuted_tokens", width, hidden, "dim 1")
    experts = op.dims("probs", rank=2)[1]
    for name in ("probs", "routing_map"):
        of_tokens, of_experts = op.dims(name, rank=2)
        op.expect_equal(name, of_tokens, tokens, "dim 0")
        op.expect_equal(name, of_experts, experts, "dim 1")
    _check_counts(op, slots, tokens, experts)


def _check_counts(op: Call, slots: Dim, tokens: Dim, experts: Dim) -> None:
    if op.drop_and_pad:
        capacity = whole(slots, experts)
        if known_less(tokens, capacity):
            raise op.error("out_index", got=f"capacity {capacity}", want=f"<= {tokens} tokens")
    else:
        top_k = whole(slots, tokens)
        if known_less(experts, top_k):
            raise op.error("out_index", got=f"topK {top_k}", want=f"<= {experts} experts")


def _token_of_row(op: Call) -> torch.Tensor:
    """Return the token of each row, -1 for a row of no copy.

    Raises:
        OpError: an index is out of range, or two slots share a row.
    """
    slots, tokens = op.out_index.shape[0], op.unpermuted_tokens_grad.shape[0]
    if op.drop_and_pad:
        check_range(op, "out_index", op.out_index, 0, slots, "the rows")
        check_range(op, "permute_token_id", op.permute_token_id, 0, tokens, "the tokens")
        if op.probs is not None:
            check_whole(op, "out_index", slots, op.probs.shape[1], "E")
        token = op.permute_token_id
    else:
        check_range(op, "out_index", op.out_index, -1, slots, "the rows, or -1")
        check_whole(op, "out_index", slots, tokens, "T")
        token = torch.arange(slots, dtype=torch.int32, device=op.out_index.device)
        token = torch.div(token, max(whole(slots, tokens), 1), rounding_mode="floor")
    token_of_row = torch.full((slots + 1,), -1, dtype=torch.int32, device=token.device)
    # Unused slots write to a row beyond the last.
    token_of_row[torch.where(op.out_index < 0, slots, op.out_index)] = token
    token_of_row = token_of_row[:slots]
    distinct, wanted = int((token_of_row >= 0).sum()), int((op.out_index >= 0).sum())
    if distinct != wanted:
        raise op.error(
            "out_index",
            got=f"{distinct} rows for {wanted} slots",
            want="a row of its own for each slot",
        )
    return token_of_row


def _check_copies(op: Call, token_of_row: torch.Tensor, copies: int) -> None:
    """Raise unless the rows of copies are the first `copies` ones."""
    rows = token_of_row.shape[0]
    filled = int((token_of_row[:copies] >= 0).sum())
    used = int((token_of_row >= 0).sum())
    if copies > rows or filled != copies or used != copies:
        raise op.error(
            "routing_map",
            got=f"{copies} copies",
            want=f"the copies that out_index lists: {used} rows, from the first on",
        )


def _compute(op: Call) -> Tensors:
    token_of_row = _token_of_row(op)
    grad = op.unpermuted_tokens_grad
    rows, hidden = token_of_row.shape[0], grad.shape[1]
    output = op.new_output((rows, hidden), grad.dtype, grad.device)
    filled = token_of_row >= 0
    probs_grad = None
    if op.probs is not None:
        places = _places(op, token_of_row)
        dot = _weighted(op, token_of_row, places, output)
        probs_grad = spread(dot.to(op.probs.dtype), places, op.probs.shape)
    elif grad.shape[0]:
        gather_rows(grad, token_of_row.clamp(min=0), output)
    if not bool(filled.all()):
        output.masked_fill_(~filled.unsqueeze(1), torch.nan)
    return [output, probs_grad]


def _places(op: Call, token_of_row: torch.Tensor) -> torch.Tensor:
    """Return ``t * E + e`` of the rows of copies."""
    if op.drop_and_pad:
        return places_of_rows(token_of_row, op.probs.shape[1])
    places = places_of_copies(mask_of(op, "routing_map").t())
    _check_copies(op, token_of_row, places.shape[0])
    return places


def _weighted(
    op: Call, token_of_row: torch.Tensor, places: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of the rows to `output` and return the dot products, ``[N]`` fp32."""
    grad, probs = op.unpermuted_tokens_grad, op.probs.reshape(-1)
    rows, hidden = output.shape
    weight = probs.new_zeros(rows)
    weight[: places.shape[0]] = probs.index_select(0, places)
    dot = torch.empty(rows, dtype=torch.float32, device=grad.device)

    def work(chunk: slice) -> None:
        of_token = grad.index_select(0, token_of_row[chunk].clamp(min=0)).to(torch.float32)
        torch.sum(of_token * op.permuted_tokens[chunk], 1, out=dot[chunk])
        output[chunk] = of_token.mul_(weight[chunk].to(torch.float32).unsqueeze(1))

    run_parts(work, row_chunks(rows if grad.shape[0] else 0, hidden))
    return dot


def _naive(op: Call) -> Tensors:
    token_of_row = _token_of_row(op)
    grad = op.unpermuted_tokens_grad
    rows = token_of_row.shape[0]
    output = torch.full((rows, grad.shape[1]), torch.nan, dtype=grad.dtype)
    if op.probs is None:
        for row, token in enumerate(token_of_row.tolist()):
            if token >= 0:
                output[row] = grad[token]
        return [output, None]
    probs_grad = torch.zeros_like(op.probs)
    if op.drop_and_pad:
        capacity = rows // op.probs.shape[1]
        copies = [(t, row // capacity) for row, t in enumerate(token_of_row.tolist())]
    else:
        copies = copies_of(mask_of(op, "routing_map"))
        _check_copies(op, token_of_row, len(copies))
    for row, (t, e) in enumerate(copies):
        of_token = grad[token_of_row[row]].to(torch.float32)
        output[row] = of_token * op.probs[t, e].to(torch.float32)
        probs_grad[t, e] = (of_token * op.permuted_tokens[row].to(torch.float32)).sum()
    return [output, probs_grad]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenUnpermuteWithRoutingMapGrad",
        inputs=(
            Input("unpermuted_tokens_grad", UNPERMUTE_ROWS),
            Input("out_index", (torch.int32,)),
            Input("permute_token_id", (torch.int32,)),
            Input("routing_map", MAPS, "optional"),
            Input("permuted_tokens", UNPERMUTE_ROWS, "optional"),
            Input("probs", UNPERMUTE_PROBS, "optional"),
        ),
        outputs=(Output("permuted_tokens_grad"), Output("probs_grad", required=False)),
        attrs=(Attr("drop_and_pad", "Bool", False), Attr("restore_shape", "ListInt", ())),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        compute=_compute,
        naive=_naive,
        limits=LIMITS,
        checked_outputs=("permuted_tokens_grad", "probs_grad"),
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "dropless",
                {
                    "unpermuted_tokens_grad": "T H",
                    "out_index": "T*K",
                    "permute_token_id": "T*K",
                    "routing_map": "T E",
                    "permuted_tokens": "T*K H",
                    "probs": "T E",
                },
            ),
            Form(
                "without probs",
                {"unpermuted_tokens_grad": "T H", "out_index": "N", "permute_token_id": "N"},
            ),
        ),
        function="moe_token_unpermute_with_routing_map_grad",
        doc="ops-transformer moe/moe_token_unpermute_with_routing_map_grad: tiling; "
        "docs/aclnnMoeTokenUnpermuteWithRoutingMapGrad.md; op-plugin's derivatives",
    )
)
