"""Dispatch to and combine from the experts of other ranks."""

from __future__ import annotations

from moe_graph.ops.defs.distribute import moe_distribute_combine, moe_distribute_dispatch

__all__ = ["moe_distribute_combine", "moe_distribute_dispatch"]
