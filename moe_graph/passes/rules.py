"""Loads every transfer rule; importing a ``facts_*`` module registers its rules."""

from moe_graph.passes import (
    facts_combine,
    facts_loops,
    facts_maps,
    facts_masks,
    facts_routing,
    facts_rows,
    facts_rowwise,
    facts_shape,
    facts_splits,
)

__all__ = [
    "facts_combine",
    "facts_loops",
    "facts_maps",
    "facts_masks",
    "facts_routing",
    "facts_rows",
    "facts_rowwise",
    "facts_shape",
    "facts_splits",
]
