"""How large HCCL_BUFFSIZE has to be for a layer of experts, in bytes.

Dispatch and combine exchange rows through a buffer that is reserved when the group is made. These
are the formulas of the products, on integers. ``BS`` is the most tokens of one rank.
"""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_BUFFSIZE = 200 * MIB
"""HCCL_BUFFSIZE where the environment does not set it."""

_ELEMENT = 2  # bytes of a row's element: bfloat16 or float16


def fullmesh_bytes(
    *,
    max_bs: int,
    hidden: int,
    top_k: int,
    ep_world_size: int,
    local_experts: int,
    shared_experts: int = 0,
    fullmesh_v2: bool = False,
    on_950: bool = False,
) -> int:
    """Return what a full-mesh exchange needs on A3 and Ascend 950; less is an error there.

    Args:
        max_bs: BS.
        hidden: H.
        top_k: K.
        ep_world_size: ranks.
        local_experts: experts of one rank.
        shared_experts: shared experts of the layer.
        fullmesh_v2: ``comm_alg="fullmesh_v2"``, where 480 of 512 bytes of a block carry data.
        on_950: Ascend 950, which keeps 1 KiB more per rank.
    """
    with_assist = _align(_ELEMENT * hidden, 32) + 64
    sent = _ceildiv(with_assist, 480 if fullmesh_v2 else 512) * 512
    returned = _align(_ELEMENT * hidden, 512)
    dispatched = local_experts * max_bs * ep_world_size * sent
    combined = (top_k + shared_experts) * max_bs * returned
    return 2 * (dispatched + combined) + (ep_world_size * 1024 if on_950 else 0)


def hierarchy_bytes(*, max_bs: int, hidden: int, top_k: int, experts: int) -> int:
    """Return what ``comm_alg="hierarchy"`` needs on A3 and Ascend 950; less is an error there."""
    indices = 3 * (top_k + 7) // 8 * 8  # from left to right, which is no alignment of 3 K
    per_row = _ELEMENT * hidden + indices * 4 + 64
    return experts * max_bs * per_row + 404 * MIB


def a2_fullmesh_bytes(
    *, max_bs: int, hidden: int, top_k: int, ep_world_size: int, local_experts: int
) -> int:
    """Return what a full-mesh exchange needs on A2, which only warns about less."""
    rows = max_bs * ep_world_size * min(local_experts, top_k)
    return 2 * (rows * _ELEMENT * hidden + 2 * MIB)


def a2_hierarchy_bytes(
    *, max_bs: int, hidden: int, top_k: int, ep_world_size: int, experts: int
) -> int:
    """Return what a layered exchange needs on A2, which only warns about less."""
    block = _align(max_bs * (_ELEMENT * hidden + 16 * _align(top_k, 8)), 512)
    return (experts + ep_world_size // 4) * block + 8 * MIB


def _align(size: int, step: int) -> int:
    return _ceildiv(size, step) * step


def _ceildiv(size: int, step: int) -> int:
    return -(-size // step)
