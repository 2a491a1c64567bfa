"""One module per GE op, by family. Importing the package registers every OpDef and binds it."""

from __future__ import annotations

from moe_graph.ops.defs import (
    distribute,
    experts,
    finalize_routing,
    gating,
    init_routing,
    products,
    routing_map,
    token_permute,
)
from moe_graph.ops.defs.products.grouped_matmul_single import bind_single
from moe_graph.ops.registry import all_opdefs
from moe_graph.ops.torch_binding import bind

for _opdef in all_opdefs():
    bind(_opdef)
bind_single()

__all__ = [
    "distribute",
    "experts",
    "finalize_routing",
    "gating",
    "init_routing",
    "products",
    "routing_map",
    "token_permute",
]
