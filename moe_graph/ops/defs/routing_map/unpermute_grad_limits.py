"""Limits of MoeTokenUnpermuteWithRoutingMapGrad, which hold with probs."""

from __future__ import annotations

from typing import Any

from moe_graph.config import Soc
from moe_graph.ops.defs.routing_map.routing_maps import MAX_TOP_K, whole
from moe_graph.ops.dims import Dim, mul
from moe_graph.ops.limit import Limit, dim

_BUFFER_BYTES = 196608
"""The unified buffer of A2 and A3; the page does not give that of Ascend 950."""

_PAGE = "moe_token_unpermute_with_routing_map_grad/docs/aclnnMoeTokenUnpermuteWithRoutingMapGrad.md"
_A2_A3 = (Soc.A2, Soc.A3)


def _top_k(op: Any) -> Dim | None:
    if op.drop_and_pad or op.probs is None:
        return None
    return whole(dim("out_index", 0)(op), dim("unpermuted_tokens_grad", 0)(op))


def _rows_at_a_time(op: Any) -> int | None:
    """Return how many rows fit the buffer beside the probs of a token, by the page's formula."""
    experts = None if op.probs is None or op.drop_and_pad else dim("probs", 1)(op)
    if not isinstance(experts, int) or experts < 0:
        return None
    token_bytes, probs_bytes = op.unpermuted_tokens_grad.dtype.itemsize, op.probs.dtype.itemsize
    aligned = -(-experts // 32) * 32
    free = _BUFFER_BYTES - (probs_bytes + 1) * aligned - (token_bytes + 8) * 256
    return int(free // (6 * token_bytes + 12))


def _row_bytes(op: Any) -> Dim | None:
    if op.probs is None or not op.drop_and_pad:
        return None
    return mul(dim("unpermuted_tokens_grad", 1)(op), 8 + op.unpermuted_tokens_grad.dtype.itemsize)


LIMITS = (
    Limit("out_index", "topK (N // T)", _top_k, source=_PAGE, high=MAX_TOP_K),
    Limit(
        "probs",
        "rows that fit the buffer beside the probs of a token",
        _rows_at_a_time,
        source=_PAGE,
        low=1,
        products=_A2_A3,
    ),
    Limit(
        "unpermuted_tokens_grad",
        "H * (8 + bytes of an element) with drop and pad",
        _row_bytes,
        source=_PAGE,
        high=256 * (_BUFFER_BYTES - 2080),
        products=_A2_A3,
    ),
)
