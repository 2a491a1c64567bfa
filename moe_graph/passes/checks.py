"""Checks of a whole layer, after every part of it has its facts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.endings import ending_of
from moe_graph.passes.facts import Combined, PerSlot, Rows, SlotProduct
from moe_graph.passes.layer import Layer
from moe_graph.passes.misses import Miss
from moe_graph.passes.products import experts_of
from moe_graph.passes.region import outside_users


def failed_check(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """Return the first check that the layer which ends in `total` fails."""
    checks = (_dispatch, _bound, _experts, _grad_mode, _widths, _writes)
    for check in checks:
        miss = check(facts, total, combined)
        if miss is not None:
            return miss
    return None


def _dispatches(facts: Facts, combined: Combined) -> Iterator[tuple[Node, Node, Node]]:
    """Yield (tokens, node that reads them, node that yields their rows) of a layer."""
    for leaf in combined.contribution.body.leaves:
        fact = facts.given[leaf]
        if isinstance(fact, Rows):
            yield fact.source, fact.read_at, leaf
        elif isinstance(fact, SlotProduct) and fact.tokens is not None:
            yield fact.tokens, fact.read_at or leaf, leaf


def _dispatch(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """The products read rows of tokens."""
    position = facts.position
    first = min((position[leaf] for *_, leaf in _dispatches(facts, combined)), default=None)
    product = min(map(position.__getitem__, combined.contribution.body.products))
    if first is not None and first <= product:
        return None
    return Miss("dispatch", total, combined.root, "products of no token's rows", "rows of tokens")


def _bound(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """Every id is known to be that of an expert."""
    root = combined.root
    if root.bound is not None:
        return None
    return Miss(
        "expert-ids-bound",
        root.ids,
        root,
        lambda: f"ids of unknown range ({root.ids.name})",
        "ids from a top-k or argmax over the experts in the same graph",
        "compile the router together with the experts",
    )


def _experts(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """All weights have the same number of experts, and the ids choose among these."""
    root, products = combined.root, combined.contribution.body.products
    counts = {experts_of(facts, node) for node in products}
    if len(counts) == 1 and isinstance(min(counts), int) and (root.bound or 0) <= min(counts):
        return None
    return Miss(
        "experts",
        min(products, key=facts.position.__getitem__),
        root,
        lambda: f"ids below {root.bound}, weights of {' and '.join(map(str, counts))} experts",
        "a router over as many experts as there are weights",
    )


def _grad_mode(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """Gradients are not switched on or off within the layer."""
    share = combined.contribution
    nodes = [total, share.rows_at, share.weights_at, *share.body.leaves, *share.body.products]
    if len({facts.grad[node] for node in nodes if node is not None}) == 1:
        return None
    return Miss("grad-mode", total, combined.root, "gradients switched within it", "one grad mode")


def _widths(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """Only the first dimension of what is gathered and of the result depends on the tokens."""
    gathered = {
        leaf: fact.source
        for leaf in combined.contribution.body.leaves
        if isinstance(fact := facts.given[leaf], PerSlot)
    }
    for node, value in {**gathered, total: total}.items():
        dims = meta.shape(value)
        if not all(isinstance(dim, int) for dim in dims[1:]):
            return Miss("widths", node, combined.root, partial(str, dims), "fixed widths")
    return None


def _writes(facts: Facts, total: Node, combined: Combined) -> Miss | None:
    """What the new nodes read is, where they read it, what the source read."""
    for value, read_at, moved_to in _moved_reads(facts, total, combined):
        start, end = facts.position[read_at], facts.position[moved_to]
        written = facts.memory.written_between(value, start, end)
        if written is not None:
            return Miss(
                "in-place-write",
                written,
                combined.root,
                partial("{} is written inside the layer".format, value.name),
                "values that stay as they are until the combine",
            )
    return None


def _moved_reads(
    facts: Facts, total: Node, combined: Combined
) -> Iterator[tuple[Node, Node, Node]]:
    """Yield (value, node that reads it, node where it is read after the rewrite)."""
    share, root = combined.contribution, combined.root
    last_leaf = max(share.body.leaves, key=facts.position.__getitem__)
    yield root.ids, share.body.order.maker, last_leaf
    for product in share.body.products:
        fact = facts.given[product]
        if isinstance(fact, SlotProduct):
            yield fact.weights.table, fact.weights.read_at, product
    yield share.rows, share.rows_at, total
    if share.weights is not None and share.weights_at is not None:
        yield share.weights, share.weights_at, total
    yield from _dispatches(facts, combined)
    if combined.base is not None:
        yield combined.base, total, ending_of(facts, total, combined).end


def interior_user(facts: Facts, layer: Layer, taken: set[Node]) -> Miss | None:
    """Check that nothing else depends on the order of the rows, unless it is the one to come.

    `taken` are the nodes of other layers.
    """
    shared = (layer.body | layer.dead) & taken
    outside = outside_users(facts, layer.order, layer.body | layer.dead)
    reader = min(shared or outside, key=facts.position.__getitem__, default=None)
    if reader is None or (not shared and layer.order.stable):
        return None
    return Miss(
        "interior-user",
        reader,
        layer.root,
        lambda: f"{reader.name} reads a value of the rows in the order of the source",
        "no other use of values inside the layer",
        "sort with stable=True, or compute the value from the router's ids",
    )
