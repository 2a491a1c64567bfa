"""Products and activations of the experts: one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.products import grouped_matmul, grouped_matmul_single, swi_glu

__all__ = ["grouped_matmul", "grouped_matmul_single", "swi_glu"]
