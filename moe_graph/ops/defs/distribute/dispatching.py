"""The shape rule of both versions of dispatch, and their checks.

A is the number of rows that this rank receives at most (`layout.py`). How many it does receive is
known to the device only: ``expert_token_nums`` and ``ep_recv_count`` tell, and all A are reserved.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.distribute.checks import (
    RANKS_PER_SERVER,
    check_expert_scales,
    check_experts,
    check_global_bs,
    check_group,
    check_group_inputs,
    check_mask,
)
from moe_graph.ops.defs.distribute.layout import Batch, Layout, known_matrix, layout_of
from moe_graph.ops.defs.distribute.limits import check_top_k
from moe_graph.ops.defs.distribute.quantisation import (
    check_quantisation,
    dynamic_scales,
    expand_x_dtype,
)
from moe_graph.ops.dims import Dim, floordiv, mul
from moe_graph.ops.opdef import Call, Specs, TensorSpec

ASSIST_INFO_PER_ROW = 128


def infer_shapes(op: Call, *, first_version: bool) -> Specs:
    """Return the specs of the seven outputs."""
    tokens, hidden = known_matrix(op, "x")
    _, top_k = known_matrix(op, "expert_ids")
    layout = layout_of(op)
    batch = Batch.of(op, tokens)
    elastic = getattr(op, "elastic_info", None) is not None and op.soc is not Soc.A2
    rows = layout.rows(batch, top_k, elastic=elastic)
    local = max(1, layout.experts_per_rank) if elastic else layout.local_experts
    assist = mul(tokens, top_k) if first_version else mul(rows, ASSIST_INFO_PER_ROW)
    counts = layout.world * local + _reduce_counts(op, batch, top_k)
    return [
        TensorSpec((rows, hidden), expand_x_dtype(op), bounds=(0,)),
        dynamic_scales(op, rows, hidden),
        TensorSpec((assist,), torch.int32, bounds=() if first_version else (0,)),
        TensorSpec((local,), torch.int64),
        TensorSpec((counts,), torch.int32),
        TensorSpec((op.tp_world_size,), torch.int32),
        TensorSpec((0 if op.expert_scales is None else rows,), torch.float32, bounds=(0,)),
    ]


def _reduce_counts(op: Call, batch: Batch, top_k: Dim) -> Dim:
    """Return how many counts follow for the reduction between servers, with expert_scales.

    The two products divide at different places, which shows where 8 does not divide the ranks.
    """
    if op.expert_scales is None or op.soc is Soc.ASCEND950:
        return 0
    pairs = mul(batch.global_bs, mul(2, top_k))
    if op.soc is Soc.A2:
        return mul(pairs, op.ep_world_size // RANKS_PER_SERVER)
    return floordiv(mul(pairs, op.ep_world_size), RANKS_PER_SERVER)


def check_tiling(op: Call, *, first_version: bool) -> None:
    """Raise on what only the running op refuses."""
    check_group(op)
    layout = layout_of(op)
    check_experts(op, layout)
    tokens, _ = op.dims("x", rank=2)
    id_tokens, top_k = op.dims("expert_ids", rank=2)
    op.expect_equal("expert_ids", id_tokens, tokens, "dim 0")
    check_top_k(op, top_k)
    check_global_bs(op, tokens)
    check_mask(op, tokens, top_k)
    check_group_inputs(op)
    op.expect_one_of("expert_token_nums_type", (0, 1))
    if op.expert_scales is not None:
        check_expert_scales(op, tokens, top_k)
    if op.soc is Soc.A2:
        _check_a2(op)
    expand_x, *_ = infer_shapes(op, first_version=first_version)
    assert expand_x is not None
    check_quantisation(op, expand_x, smoothing_rows(layout))


def smoothing_rows(layout: Layout) -> int:
    """Return the rows of a matrix of smoothing scales: the shared experts, then the routed ones."""
    return layout.shared_experts + layout.experts


def _check_a2(op: Call) -> None:
    if op.shared_expert_rank_num != 0:
        raise op.error("shared_expert_rank_num", got=op.shared_expert_rank_num, want=0, limit=True)
