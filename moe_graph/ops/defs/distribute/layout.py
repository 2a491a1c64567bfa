"""How the experts of a layer lie over the ranks, and how many rows a rank can receive.

The first ``shared_expert_rank_num`` ranks hold the shared experts, ``shared_expert_rank_num /
shared_expert_num`` ranks each; the ranks after them hold the routed experts in order, equally many
each. A rank reserves room for the worst case:

- routed experts: every token of every rank, at most ``min(experts per rank, K)`` times;
- a shared expert: the tokens of the ranks that this copy of it serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_graph.config import Soc
from moe_graph.ops.dims import UNKNOWN, Dim, floordiv, is_unknown, known_less, minimum, mul
from moe_graph.ops.ir import show_shape
from moe_graph.ops.opdef import Call


@dataclass(frozen=True)
class Layout:
    """The experts as one rank sees them.

    Attributes:
        world: ranks that share the experts.
        rank: this one.
        experts: routed experts.
        shared_experts, shared_ranks: shared experts and the ranks that hold them; both 0 without.
    """

    world: int
    rank: int
    experts: int
    shared_experts: int
    shared_ranks: int

    @property
    def holds_shared_expert(self) -> bool:
        """True for a rank that holds a shared expert."""
        return self.rank < self.shared_ranks

    @property
    def experts_per_rank(self) -> int:
        """Routed experts of a rank that holds no shared one."""
        return self.experts // (self.world - self.shared_ranks)

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return 1 if self.holds_shared_expert else self.experts_per_rank

    def routed_rows(self, global_bs: Dim, top_k: Dim) -> Dim:
        """Return how many rows a rank of routed experts receives at most."""
        return mul(global_bs, minimum(self.experts_per_rank, top_k))

    def shared_rows(self, max_bs: Dim) -> Dim:
        """Return how many rows a rank of a shared expert receives at most."""
        ranks_per_expert = self.shared_ranks // self.shared_experts
        return mul(max_bs, -(-self.world // ranks_per_expert))

    def rows(self, batch: Batch, top_k: Dim, *, elastic: bool = False) -> Dim:
        """Return A, how many rows this rank receives at most.

        With an elastic group a rank may change sides, and the answer covers both.
        """
        if elastic:
            routed = self.routed_rows(batch.global_bs, top_k)
            if self.shared_experts == 0:
                return routed
            shared = self.shared_rows(batch.max_bs)
            return routed if known_less(shared, routed) else shared
        if self.holds_shared_expert:
            return self.shared_rows(batch.max_bs)
        return self.routed_rows(batch.global_bs, top_k)


@dataclass(frozen=True)
class Batch:
    """Tokens of a step: at most `max_bs` on one rank, at most `global_bs` on all of them."""

    max_bs: Dim
    global_bs: Dim

    @staticmethod
    def of(op: Call, tokens: Dim) -> Batch:
        """Return the batch of a call with `tokens` tokens on this rank.

        Raises:
            OpError: ``global_bs`` is negative; the public rule answers with an unknown size.
        """
        if op.global_bs < 0:
            if op.upstream:
                return Batch(UNKNOWN, UNKNOWN)
            raise op.error("global_bs", got=op.global_bs, want=">= 0")
        if op.global_bs == 0:
            return Batch(tokens, mul(tokens, op.ep_world_size))
        return Batch(floordiv(op.global_bs, op.ep_world_size), op.global_bs)


def layout_of(op: Call) -> Layout:
    """Return the layout that the attributes of a call describe.

    Raises:
        OpError: a rank that the group does not have, or shared experts that fit on no number of
            ranks.
    """
    world, shared_ranks = op.ep_world_size, op.shared_expert_rank_num
    _expect_below(op, "ep_rank_id", world)
    _expect_below(op, "shared_expert_rank_num", world)
    shared_experts = op.shared_expert_num
    if shared_ranks == 0 and shared_experts in (0, 1):
        shared_experts = 0  # one shared expert on no rank is how the default says "none"
    elif shared_experts < 1 or shared_ranks < shared_experts or shared_ranks % shared_experts:
        raise op.error(
            "shared_expert_num",
            got=f"{shared_experts} on {shared_ranks} ranks",
            want="shared_expert_rank_num to be a multiple of it, or both 0",
        )
    return Layout(world, op.ep_rank_id, op.moe_expert_num, shared_experts, shared_ranks)


def layout_at_run_time(op: Call) -> Layout:
    """Return the layout when the op runs: A2 has no shared experts and does not read theirs.

    Raises:
        OpError: see :func:`layout_of`.
    """
    if op.soc is Soc.A2:
        return Layout(op.ep_world_size, op.ep_rank_id, op.moe_expert_num, 0, 0)
    return layout_of(op)


def _expect_below(op: Call, attribute: str, world: int) -> None:
    value = getattr(op, attribute)
    if value < 0 or value >= world:
        raise op.error(attribute, got=value, want=f"in [0, {world}), ep_world_size")


def known_matrix(op: Call, argument: str) -> tuple[Dim, Dim]:
    """Return the two dims of an input whose sizes must be known when a graph is built.

    Symbols are known: GE sees them as numbers.

    Raises:
        OpError: another rank, or a dim that is unknown or not positive.
    """
    dims = op.dims(argument, rank=2)
    if any(is_unknown(dim) or known_less(dim, 1) for dim in dims):
        raise op.error(
            argument,
            got=f"shape {show_shape(getattr(op, argument).shape)}",
            want="positive, known dimensions",
            hint="compile for static shapes: the buffers of all ranks are laid out beforehand",
        )
    rows, columns = dims
    return rows, columns
