"""Routing back to token order, MoeFinalizeRouting and its kin: one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.finalize_routing import (
    moe_finalize_routing,
    moe_finalize_routing_v2,
    moe_finalize_routing_v2_grad,
)

__all__ = ["moe_finalize_routing", "moe_finalize_routing_v2", "moe_finalize_routing_v2_grad"]
