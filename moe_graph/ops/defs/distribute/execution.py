"""Why the ops of this family cannot be computed in one process."""

from __future__ import annotations

from moe_graph.ops.opdef import Call, Tensors

NO_GRADIENT = (
    "the op serves inference; train with all-to-all collectives around moe_init_routing and "
    "moe_finalize_routing"
)


def across_ranks(op: Call) -> Tensors:
    """Refuse to compute.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{op.opdef.ge_type} exchanges rows between ranks, which is not available here yet; its "
        "shapes, dtypes and limits are checked"
    )
