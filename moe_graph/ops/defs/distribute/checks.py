"""Checks that dispatch and combine have in common, made when the op runs.

`comm_alg` chooses how rows travel: directly (full mesh) or first between servers (hierarchy, also
called layered). On Ascend 950 ``"ccu"`` leaves the exchange to the collective unit.
"""

from __future__ import annotations

from typing import Final

from moe_graph.config import Soc
from moe_graph.ops.defs.distribute.layout import Layout
from moe_graph.ops.dims import Dim, known_less
from moe_graph.ops.ir import show_shape
from moe_graph.ops.opdef import Call, TensorSpec

RANKS_PER_SERVER: Final = 8
HIERARCHY, FULLMESH_V2, CCU = "hierarchy", "fullmesh_v2", "ccu"
_COMM_ALGS: Final[dict[Soc, tuple[str, ...]]] = {
    Soc.A2: ("", "0", "fullmesh", HIERARCHY),
    Soc.A3: ("", "fullmesh_v1", FULLMESH_V2, HIERARCHY),
    Soc.ASCEND950: ("", "fullmesh_v1", FULLMESH_V2, HIERARCHY, CCU),
}
MAX_GROUP_NAME: Final = 127
INT32_MAX: Final = (1 << 31) - 1


def comm_alg(op: Call) -> str:
    """Return how rows travel, ``""`` for the product's own choice."""
    name: str = getattr(op, "comm_alg", "")
    if op.soc is Soc.A2 and op.ep_world_size <= RANKS_PER_SERVER:
        return ""  # one server: there is nothing to choose, and the product does not look
    return name


def is_hierarchy(op: Call) -> bool:
    """True when rows travel between servers first."""
    return comm_alg(op) == HIERARCHY


def is_ccu(op: Call) -> bool:
    """True when the collective unit of Ascend 950 moves the rows."""
    return op.soc is Soc.ASCEND950 and comm_alg(op) == CCU


def check_group(op: Call) -> None:
    """Check the ranks and how they talk.

    Raises:
        OpError: a group without a name, a rank outside of it, tensor parallelism, or an unknown
            way to travel.
    """
    name = getattr(op, "group_ep", "context")  # a context stands for the name where one is given
    if not 0 < len(name) <= MAX_GROUP_NAME:
        raise op.error(
            "group_ep", got=f"a name of {len(name)} characters", want=f"1 to {MAX_GROUP_NAME}"
        )
    tp_name = getattr(op, "group_tp", "")
    if len(tp_name) > MAX_GROUP_NAME:
        raise op.error(
            "group_tp", got=f"a name of {len(tp_name)} characters", want=f"<= {MAX_GROUP_NAME}"
        )
    if not 0 <= op.ep_rank_id < op.ep_world_size:
        raise op.error("ep_rank_id", got=op.ep_rank_id, want=f"in [0, {op.ep_world_size})")
    if op.tp_world_size not in (0, 1):
        raise op.error("tp_world_size", got=op.tp_world_size, want="0 or 1", limit=True)
    if op.tp_rank_id != 0 and op.soc is Soc.ASCEND950:
        raise op.error("tp_rank_id", got=op.tp_rank_id, want="0", limit=True)
    if comm_alg(op) not in _COMM_ALGS[op.soc]:
        wanted = "one of " + ", ".join(repr(each) for each in _COMM_ALGS[op.soc])
        raise op.error("comm_alg", got=repr(op.comm_alg), want=wanted, limit=True)
    if op.soc is not Soc.A2 and op.expert_shard_type != 0:
        raise op.error("expert_shard_type", got=op.expert_shard_type, want="0", limit=True)


def check_experts(op: Call, layout: Layout) -> None:
    """Check that the experts can be dealt out to the ranks.

    Raises:
        OpError: they cannot.
    """
    ranks = layout.world - layout.shared_ranks
    if layout.experts % ranks != 0:
        raise op.error(
            "moe_expert_num", got=layout.experts, want=f"a multiple of the {ranks} ranks that hold"
        )
    for name in special_expert_attrs(op):
        if getattr(op, name) < 0:
            raise op.error(name, got=getattr(op, name), want=">= 0")
    total = layout.experts + special_experts(op)
    if total > INT32_MAX:
        raise op.error("zero_expert_num", got=f"{total} experts in all", want=f"<= {INT32_MAX}")
    if op.soc is Soc.A2 and getattr(op, "const_expert_num", 0) != 0:
        raise op.error("const_expert_num", got=op.const_expert_num, want="0", limit=True)
    if is_hierarchy(op) and special_experts(op):
        raise op.error(
            "zero_expert_num",
            got=f"{special_experts(op)} zero, copy and const experts",
            want="none with comm_alg='hierarchy'",
            limit=True,
        )


def special_expert_attrs(op: Call) -> tuple[str, ...]:
    """Return the attributes that count experts which compute nothing or next to nothing."""
    names = ("zero_expert_num", "copy_expert_num", "const_expert_num")
    return tuple(name for name in names if hasattr(op, name))


def special_experts(op: Call) -> int:
    """Return how many experts compute nothing or next to nothing."""
    return sum(getattr(op, name) for name in special_expert_attrs(op))


def check_global_bs(op: Call, tokens: Dim) -> None:
    """Check ``global_bs`` against the tokens of this rank (A3, 950).

    Raises:
        OpError: it is no multiple of the ranks, too small, or differs between ranks under a mask.
    """
    if op.soc is Soc.A2 or op.global_bs == 0:
        return
    world = op.ep_world_size
    if op.global_bs % world != 0 or known_less(op.global_bs, tokens * world):
        raise op.error(
            "global_bs",
            got=op.global_bs,
            want=f"0, or a multiple of {world} ranks and >= {tokens} * {world}",
        )
    if op.x_active_mask is not None and known_less(tokens * world, op.global_bs):
        raise op.error(
            "global_bs",
            got=op.global_bs,
            want=f"{tokens} * {world} beside x_active_mask",
            hint="ranks with different numbers of tokens cannot use x_active_mask",
        )


def check_mask(op: Call, tokens: Dim, top_k: Dim) -> None:
    """Check ``x_active_mask``: one entry per token, or one per (token, expert) pair.

    Raises:
        OpError: another shape, entries per pair where rows travel by hierarchy or ccu, or any mask
            in the first version of an op.
    """
    if op.x_active_mask is None:
        return
    if not hasattr(op, "comm_alg"):
        want = "nothing: the first version reserves the input"
        raise op.error("x_active_mask", got="a tensor", want=want)
    shape = op.x_active_mask.shape
    if len(shape) not in (1, 2):
        raise op.error("x_active_mask", got=f"shape {show_shape(shape)}", want="[BS] or [BS, K]")
    op.expect_equal("x_active_mask", shape[0], tokens, "dim 0")
    if len(shape) == 2:
        op.expect_equal("x_active_mask", shape[1], top_k, "dim 1")
        if is_ccu(op) or (is_hierarchy(op) and op.soc is not Soc.A2):
            raise op.error(
                "x_active_mask",
                got=f"shape {show_shape(shape)}",
                want=f"[BS] with comm_alg={op.comm_alg!r}",
                limit=True,
            )


def check_expert_scales(op: Call, tokens: Dim, top_k: Dim) -> None:
    """Check ``expert_scales``, which is given: one weight per (token, expert) pair.

    Raises:
        OpError: another shape.
    """
    scale_tokens, scale_k = op.dims("expert_scales", rank=2)
    op.expect_equal("expert_scales", scale_tokens, tokens, "dim 0")
    op.expect_equal("expert_scales", scale_k, top_k, "dim 1")


def check_group_inputs(op: Call) -> None:
    """Check ``elastic_info`` and ``performance_info``, which ccu does not look at.

    Raises:
        OpError: another size, or an input that this way to travel does not have.
    """
    if is_ccu(op):
        return
    world = op.ep_world_size
    _check_vector(op, "elastic_info", 4 + 2 * world, allowed=op.soc is not Soc.A2)
    _check_vector(op, "performance_info", world, allowed=True)


def _check_vector(op: Call, argument: str, size: int, *, allowed: bool) -> None:
    spec: TensorSpec | None = getattr(op, argument, None)
    if spec is None:
        return
    if not allowed or (is_hierarchy(op) and op.soc is not Soc.A2):
        raise op.error(argument, got="a tensor", want="nothing", limit=True)
    (length,) = op.dims(argument, rank=1)
    op.expect_equal(argument, length, size, "dim 0")
