"""Routers: top-k of expert scores, one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.gating import (
    moe_gating_top_k,
    moe_gating_top_k_backward,
    moe_gating_top_k_softmax,
    moe_gating_top_k_softmax_v2,
)

__all__ = [
    "moe_gating_top_k",
    "moe_gating_top_k_backward",
    "moe_gating_top_k_softmax",
    "moe_gating_top_k_softmax_v2",
]
