"""One module per GE op. Importing the package registers every OpDef and defines its torch op."""

from __future__ import annotations

from moe_graph.ops.defs import (
    grouped_matmul,
    moe_finalize_routing_v2,
    moe_finalize_routing_v2_grad,
    moe_init_routing_v2,
    moe_init_routing_v2_grad,
    swi_glu,
)
from moe_graph.ops.defs.grouped_matmul_single import bind_single
from moe_graph.ops.registry import all_opdefs
from moe_graph.ops.torch_binding import bind

for _opdef in all_opdefs():
    bind(_opdef)
bind_single()

__all__ = [
    "grouped_matmul",
    "moe_finalize_routing_v2",
    "moe_finalize_routing_v2_grad",
    "moe_init_routing_v2",
    "moe_init_routing_v2_grad",
    "swi_glu",
]
