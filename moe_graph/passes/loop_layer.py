"""A proved MoE layer in the form of a loop over its experts, and the checks that prove it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.combine_weights import Weights, weights_of
from moe_graph.passes.endings import Ending, ending_of, other_reader
from moe_graph.passes.facts import Combined, Grouped, PerSlot, Root, Rows, Unrolled
from moe_graph.passes.loops import Loop, loop_of
from moe_graph.passes.misses import Miss
from moe_graph.passes.region import falls_away


@dataclass(frozen=True, eq=False)
class LoopLayer:
    """A loop over experts that one grouped body can take the place of.

    Attributes:
        anchor: node that stands for it in the report.
        loop: its bodies.
        weights: what multiplies the rows of the last product, None for a plain sum.
        ending: where the sum is.
        dead: nodes that fall away.
        body: nodes that stay: none.
    """

    anchor: Node
    loop: Loop
    weights: Weights | None
    ending: Ending
    dead: set[Node]
    body: frozenset[Node] = frozenset()
    form: str = "expert-loop"

    @property
    def root(self) -> Root:
        """The expert ids that all of it is about."""
        return self.loop.root

    @property
    def end(self) -> Node:
        """The node that completes the sum."""
        return self.ending.end

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.loop.experts


def loop_layer_of(facts: Facts, total: Node, combined: Combined) -> LoopLayer | Miss | None:
    """Return the layer that ends in `total`, the check that it fails, None for no MoE layer."""
    unrolled = combined.contribution
    assert isinstance(unrolled, Unrolled)
    loop = loop_of(facts, [share.rows for share in unrolled.shares])
    if not isinstance(loop, Loop):
        return loop
    ending = ending_of(facts, total, combined)
    miss = _failed_check(facts, loop, unrolled, ending)
    if miss is not None:
        return miss
    parameters = {node for stack in loop.parameters.values() for node in stack.sources}
    needed = {loop.root.ids, *parameters, *_sources(facts, unrolled)}
    weights = weights_of(facts, unrolled, ending.end)
    needed |= {weights.node} if weights is not None else set()
    needed |= {combined.base} if combined.base is not None else set()
    dead = falls_away(facts, {ending.end}, needed, ending.served)
    miss = other_reader(facts, ending, dead, combined)
    if miss is not None:
        return miss
    alive = _alive(facts, loop.root, dead)
    if alive is not None:
        return Miss(
            "interior-user",
            alive,
            loop.root,
            f"{alive.name} stays in use",
            "no other use of values inside the loop",
            "compute the value from the router's ids",
        )
    return LoopLayer(ending.end, loop, weights, ending, dead)


def _alive(facts: Facts, root: Root, dead: set[Node]) -> Node | None:
    """Return a reader of some expert's rows that would stay, None when all fall away."""
    for node, fact in facts.given.items():
        of_expert = (
            isinstance(fact, Grouped) and fact.root is root and fact.order.expert is not None
        )
        if of_expert and node not in dead:
            return next((user for user in node.users if user not in dead), node)
    return None


def _leaves(facts: Facts, unrolled: Unrolled) -> Iterator[tuple[Node, Rows | PerSlot]]:
    for share in unrolled.shares:
        for leaf in share.body.leaves:
            fact = facts.given[leaf]
            if isinstance(fact, Rows | PerSlot):
                yield leaf, fact


def _sources(facts: Facts, unrolled: Unrolled) -> set[Node]:
    return {fact.source for _, fact in _leaves(facts, unrolled)}


def _failed_check(facts: Facts, loop: Loop, unrolled: Unrolled, ending: Ending) -> Miss | None:
    """Return the first check that the layer as a whole fails."""
    weights = [share.weights for share in unrolled.shares]
    if unrolled.weights is None and any(node is not None for node in weights):
        want = "one tensor of weights for all experts"
        return Miss("equal-experts", ending.end, loop.root, "weights of several tensors", want)
    return (
        _dispatch(facts, loop, unrolled, ending.end)
        or _grad_mode(facts, loop, unrolled, ending.end)
        or _widths(facts, loop, unrolled, ending.result)
        or _writes(facts, loop, unrolled, ending)
    )


def _dispatch(facts: Facts, loop: Loop, unrolled: Unrolled, end: Node) -> Miss | None:
    """Every leaf is a row of a token or a value per slot, and there are rows of tokens."""
    leaves = {leaf: facts.given[leaf] for leaf in unrolled.body.leaves}
    strange = next((n for n, f in leaves.items() if not isinstance(f, Rows | PerSlot)), None)
    if strange is None and any(isinstance(fact, Rows) for fact in leaves.values()):
        return None
    got = f"bodies that read {strange.name}" if strange is not None else "bodies without tokens"
    return Miss("dispatch", strange or end, loop.root, got, "rows of tokens, and values per slot")


def _grad_mode(facts: Facts, loop: Loop, unrolled: Unrolled, end: Node) -> Miss | None:
    """Gradients are not switched on or off within the loop."""
    nodes = [end, *(leaf for leaf, _ in _leaves(facts, unrolled))]
    nodes += [node for share in unrolled.shares for node in share.body.products]
    if len({facts.grad[node] for node in nodes}) == 1:
        return None
    return Miss("grad-mode", end, loop.root, "gradients switched within it", "one grad mode")


def _widths(facts: Facts, loop: Loop, unrolled: Unrolled, result: Node) -> Miss | None:
    """Only the first dimension of values per slot and of the result depends on the tokens."""
    values = [leaf for leaf, fact in _leaves(facts, unrolled) if isinstance(fact, PerSlot)]
    for node in (result, *values):
        dims = meta.shape(node)
        if not all(isinstance(dim, int) for dim in dims[1:]):
            return Miss("widths", node, loop.root, str(dims), "fixed widths")
    return None


def _writes(facts: Facts, loop: Loop, unrolled: Unrolled, ending: Ending) -> Miss | None:
    """What the grouped body reads at the end of the loop is what the bodies read."""
    position, end = facts.position, ending.end
    reads = [(loop.root.ids, loop.root.ids)]
    reads += [(fact.source, leaf) for leaf, fact in _leaves(facts, unrolled)]
    reads += [(node, node) for stack in loop.parameters.values() for node in stack.views]
    if unrolled.weights is not None and unrolled.weights_at is not None:
        reads.append((unrolled.weights, unrolled.weights_at))
    for value, read_at in reads:
        written = facts.memory.written_between(value, position[read_at], position[end])
        if written is not None:
            got = f"{value.name} is written inside the loop"
            return Miss("in-place-write", written, loop.root, got, "values that stay as they are")
    return None
