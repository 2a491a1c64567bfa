"""Routing into expert order, MoeInitRouting and its kin: one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.init_routing import (
    moe_init_routing,
    moe_init_routing_quant,
    moe_init_routing_quant_v2,
    moe_init_routing_v2,
    moe_init_routing_v2_grad,
    moe_init_routing_v3,
)

__all__ = [
    "moe_init_routing",
    "moe_init_routing_quant",
    "moe_init_routing_quant_v2",
    "moe_init_routing_v2",
    "moe_init_routing_v2_grad",
    "moe_init_routing_v3",
]
