"""Which nodes belong to a layer, which of them fall away, and who else looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Fact,
    Grouped,
    Inverse,
    Joined,
    Order,
    Part,
    PerSlot,
    TokenOfRow,
)
from moe_graph.passes.facts_rowwise import as_row_wise
from moe_graph.passes.spellings import RANDOM

ASSERTS = frozenset(
    [
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "_check",
        "_check_is_size",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    ]
)
"""Checks that tracing leaves on values."""

_READ_BY_ASSERTS = frozenset(
    [
        "add",
        "eq",
        "ge",
        "gt",
        "le",
        "lt",
        "mul",
        "ne",
        "result",
        "size",
        "sub",
        "sym_size",
        "sym_sum",
    ]
)


def body_of(facts: Facts, rows: Node, leaves: frozenset[Node]) -> set[Node]:
    """Return the row-wise nodes between the leaves and the rows that are combined.

    A write in place belongs to the body of the tensor that it writes.
    """
    body: set[Node] = set()
    pending = [rows]
    while pending:
        node = pending.pop()
        fact = facts.given.get(node)
        from_outside = isinstance(fact, PerSlot) and fact.source is node
        if node in body or from_outside or not isinstance(fact, Grouped):
            continue
        body.add(node)
        if isinstance(fact, Joined):
            pending.extend(wholes_of(facts, node))
        elif node not in leaves:
            pending.extend(node.all_input_nodes)
        pending.extend(user for user in node.users if facts.calls[user].writes is node)
    return body


def wholes_of(facts: Facts, join: Node) -> set[Node]:
    """Return the grouped rows that were split for the bodies whose results `join` joins."""
    joined = facts.given[join]
    parts = joined.parts if isinstance(joined, Joined) else ()
    bodies = [as_row_wise(part, facts.given.get(part)) for part in parts]
    leaves = (facts.given[leaf] for body in bodies if body is not None for leaf in body.leaves)
    return {leaf.source for leaf in leaves if isinstance(leaf, Part)}


def falls_away(
    facts: Facts,
    replaced: Iterable[Node],
    needed: set[Node],
    served: Mapping[Node, set[Node]] | None = None,
) -> set[Node]:
    """Return the nodes that nothing uses once `replaced` have other nodes in their place.

    `needed` are the operands of those other nodes. `served` names users of a node that will read
    another node in its place.

    A tensor that is written in place falls away with every view and every write, or not at all.
    """
    replaced, served = set(replaced), served or {}
    last = max(map(facts.position.__getitem__, replaced))
    groups = {node: _group(facts, node, last) for node in _behind(facts, replaced, needed, last)}
    dead = {node for node, group in groups.items() if not group & needed} | replaced
    pending = list(dead - replaced)
    while pending:
        node = pending.pop()
        if node not in dead:
            continue
        readers = (user for user in node.users if user not in served.get(node, ()))
        alive = any(other not in dead for other in (*groups[node], *readers))
        if alive or not _is_droppable(facts, node):
            dead.discard(node)
            # Whatever a living node reads, or shares written memory with, lives.
            connected = {*node.all_input_nodes, *groups[node]} - replaced
            pending.extend(other for other in connected if other in dead)
    return dead


def _behind(facts: Facts, replaced: set[Node], kept: set[Node], last: int) -> dict[Node, None]:
    """Return all that `replaced` are computed from, with the checks on it, up to `kept`.

    `last` is the position of the last of the replaced nodes.
    """
    found: dict[Node, None] = {}
    pending = list(replaced)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in found or source in replaced or source in kept:
                continue
            members = (_group(facts, source, last) | {source}) - kept
            members |= {user for node in members for user in _asserts_on(facts, node)}
            new = [node for node in members if node not in found and node not in replaced]
            found.update(dict.fromkeys(new))
            pending.extend(new)
    return found


def _group(facts: Facts, node: Node, last: int) -> set[Node]:
    """Return all nodes that may share memory with `node` if it is written or is itself a write.

    Only those up to the position `last` count: a later one is a reader like any other.
    """
    writes = (facts.calls[user].writes is node for user in node.users)
    if facts.calls[node].writes is None and not any(writes):
        return set()
    return {other for other in facts.memory.sharing(node) if facts.position[other] <= last}


def _asserts_on(facts: Facts, node: Node) -> set[Node]:
    """Return the users of a node that do nothing but check it, with what the checks compute."""
    found: set[Node] = set()
    for user in node.users:
        if facts.calls[user].op in ASSERTS:
            found.add(user)
        elif user.users and facts.calls[user].op in _READ_BY_ASSERTS:
            behind = _asserts_on(facts, user)
            if all(reader in behind for reader in user.users):
                found |= {user, *behind}
    return found


def _is_droppable(facts: Facts, node: Node) -> bool:
    call = facts.calls[node]
    is_call = node.op in ("call_function", "call_method")
    known = call.known or call.op in ASSERTS or call.op in _READ_BY_ASSERTS
    random = call.op in RANDOM and not is_identity(call)
    return is_call and known and not random and call.op != "set_grad_enabled"


def is_identity(call: Call) -> bool:
    """Tell whether a dropout drops nothing."""
    return call.op == "dropout" and (call["training"] is False or call["p"] == 0)


def outside_users(facts: Facts, order: Order, inside: set[Node]) -> list[Node]:
    """Return the nodes outside `inside` that read a value in the order of the rows.

    Any value may be in the order of the slots: only those inside change their order.
    """
    found: list[Node] = []
    for node, fact in facts.given.items():
        if not order.same(_order_of(fact)):
            continue
        if node not in inside:
            found.extend([node] if order.grouped else [])
        else:
            found.extend(user for user in node.users if user not in inside)
    return found


def _order_of(fact: Fact) -> Order | None:
    """Return the permutation that a value depends on."""
    if isinstance(fact, Order):
        return fact
    return fact.order if isinstance(fact, Inverse | TokenOfRow | Grouped) else None
