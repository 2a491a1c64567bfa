"""Routing as MoeInitRouting defines it, which its quantising form shares.

``row_idx`` numbers the copies, as the caller likes; k-major is meant: ``arange(n * K).reshape(K,
n).T``. With ``s`` the stable ascending argsort of the flat expert ids and ``c = row_idx[s]``,

- row i is row ``c[i] % n`` of x, for the first ``min(active_num, n) * K`` i;
- ``expanded_row_idx[c[i]] = i``;
- ``expanded_expert_idx[i]`` is the i-th of the sorted ids.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.init_routing.moe_init_routing_v2 import MAX_EXACT_ID
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.poison import poisoned
from moe_graph.ops.dims import Dim, is_unknown, minimum, mul
from moe_graph.ops.opdef import Call, Specs, TensorSpec


def infer_shapes(op: Call, row_dtype: torch.dtype) -> Specs:
    """Return the specs of the three outputs; rows are of `row_dtype`."""
    tokens, hidden = op.dims("x", rank=2)
    row_tokens, row_k = op.dims("row_idx", rank=2)
    id_tokens, id_k = op.dims("expert_idx", rank=2)
    op.expect_equal("row_idx", row_tokens, tokens, "dim 0")
    op.expect_equal("expert_idx", id_tokens, tokens, "dim 0")
    op.expect_equal("expert_idx", id_tokens, row_tokens, "dim 0")
    op.expect_equal("expert_idx", id_k, row_k, "dim 1")
    op.expect_at_least("active_num", 0)
    tokens = _first_known(tokens, row_tokens, id_tokens)
    top_k = _first_known(row_k, id_k)
    copies = mul(tokens, top_k)
    return [
        TensorSpec((mul(minimum(tokens, op.active_num), top_k), hidden), row_dtype),
        TensorSpec((copies,), torch.int32),
        TensorSpec((copies,), torch.int32),
    ]


def _first_known(*dims: Dim) -> Dim:
    return next((dim for dim in dims if not is_unknown(dim)), dims[0])


def check_values(op: Call) -> None:
    """Raise on ids that are not exact as sort keys, and on copies that do not exist."""
    check_range(op, "expert_idx", op.expert_idx, 0, MAX_EXACT_ID, "exact as fp32 sort keys")
    check_range(op, "row_idx", op.row_idx, 0, op.row_idx.numel(), "the copies of tokens")


def route(op: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token of each row that is kept, and the two index outputs."""
    check_values(op)
    sorted_ids, order = torch.sort(op.expert_idx.reshape(-1), stable=True)
    copies = op.row_idx.reshape(-1)[order]
    del order
    tokens, top_k = op.expert_idx.shape
    row_idx = poisoned(copies.shape, torch.int32, copies.device)
    row_of = torch.arange(copies.shape[0], dtype=torch.int32, device=copies.device)
    row_idx.scatter_(0, copies.to(torch.int64), row_of)
    kept = min(op.active_num, tokens) * top_k
    return copies[:kept] % max(tokens, 1), row_idx, sorted_ids


def route_naively(op: Call) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """:func:`route` by its definition."""
    check_values(op)
    tokens, top_k = op.expert_idx.shape
    ids, numbers = op.expert_idx.reshape(-1).tolist(), op.row_idx.reshape(-1).tolist()
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    row_idx = poisoned((len(ids),), torch.int32, op.x.device)
    for row, place in enumerate(order):
        row_idx[numbers[place]] = row
    kept = order[: min(op.active_num, tokens) * top_k]
    sorted_ids = torch.tensor([ids[place] for place in order], dtype=torch.int32)
    return [numbers[place] % tokens for place in kept], row_idx, sorted_ids
