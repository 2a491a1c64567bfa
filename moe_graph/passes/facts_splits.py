"""Grouped rows split by the counts of the experts, and the experts' results joined again.

::

    counts[e], counts[e].item()                CountOf
    rows.split([count_0, ..., count_(E-1)])    Part, one per expert
    token.split(...), order.split(...)         TokenOfRow, Order of one expert each
    torch.cat([y_0, ..., y_(E-1)])             Joined: rows in the order before the split
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    CountOf,
    Counts,
    Fact,
    Joined,
    Order,
    Outputs,
    Part,
    TokenOfRow,
)
from moe_graph.passes.facts_rowwise import as_row_wise, grouped_order, row_local
from moe_graph.passes.misses import Miss


@rule("item")
def _item(call: Call, facts: Facts) -> Fact | None:
    fact = facts.of(call["input"])
    return fact if isinstance(fact, CountOf) else None


def entry_of_counts(call: Call, fact: Counts) -> Fact | None:
    """Return what a basic subscript of the counts is: the count of one expert."""
    index = call["index"]
    expert = index[0] if len(index) == 1 else None
    if not isinstance(expert, int) or isinstance(expert, bool) or not 0 <= expert < fact.experts:
        return None
    return CountOf(fact.root, expert)


@rule("split")
def _split(call: Call, facts: Facts) -> Fact | Miss | None:
    source, sizes = call["input"], call["split_size"]
    fact = facts.of(source)
    order = fact if isinstance(fact, Order) else grouped_order(fact)
    if isinstance(fact, TokenOfRow):
        order = fact.order
    if order is None or not isinstance(sizes, tuple | list) or not meta.is_tensor(source):
        return row_local(call, facts)
    if meta.wrap_dim(call["dim"], len(meta.shape(source))) != 0:
        return row_local(call, facts)
    counts = [facts.of(size) for size in sizes]
    by_expert = all(
        isinstance(count, CountOf) and count.root is order.root and count.expert == expert
        for expert, count in enumerate(counts)
    )
    if not by_expert or len(counts) != order.root.bound or order.expert is not None:
        return Miss(
            "split-sizes",
            call.node,
            order.root,
            lambda: f"rows split into {list(map(str, sizes))}",
            "one part per expert, of as many rows as the expert has",
        )
    own = [replace(order, expert=expert) for expert in range(len(counts))]
    if isinstance(fact, Order):
        return Outputs(tuple(own))
    if isinstance(fact, TokenOfRow):
        return Outputs(tuple(TokenOfRow(order.root, part) for part in own))
    return Outputs(tuple(Part(order.root, part, source, call.node) for part in own))


def join(call: Call, facts: Facts) -> Joined | None:
    """Return what a ``cat`` of one value per expert is, None for any other ``cat``."""
    tensors: list[Node] = list(call["tensors"])
    bodies = [as_row_wise(node, facts.of(node)) for node in tensors]
    if not bodies or meta.wrap_dim(call["dim"], len(meta.shape(call.node))) != 0:
        return None
    whole: set[Order] = set()
    leaves: frozenset[Node] = frozenset()
    products: frozenset[Node] = frozenset()
    for expert, body in enumerate(bodies):
        if body is None or body.order.expert != expert:
            return None
        for leaf in body.leaves:
            part = facts.given[leaf]
            source = part.source if isinstance(part, Part) else None
            before = as_row_wise(source, facts.given.get(source)) if source is not None else None
            if before is None:
                return None
            whole.add(before.order)
            leaves |= before.leaves
            products |= before.products
    order = next(iter(whole))
    if len(bodies) != order.root.bound or not all(order.same(other) for other in whole):
        return None
    own = products | {call.node} if any(body and body.products for body in bodies) else products
    return Joined(order.root, order, leaves, own, tuple(tensors))
