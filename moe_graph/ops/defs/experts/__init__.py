"""Small ops on expert ids, counts and rows: one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.experts import (
    moe_compute_expert_tokens,
    moe_re_routing,
    moe_update_expert,
)

__all__ = ["moe_compute_expert_tokens", "moe_re_routing", "moe_update_expert"]
