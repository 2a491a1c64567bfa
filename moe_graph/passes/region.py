"""Which nodes belong to a layer, which of them fall away, and who else looks at them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.facts import Fact, Grouped, Inverse, Order, PerSlot, TokenOfRow
from moe_graph.passes.spellings import RANDOM


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
        if node not in leaves:
            pending.extend(node.all_input_nodes)
        pending.extend(user for user in node.users if facts.calls[user].writes is node)
    return body


def falls_away(facts: Facts, replaced: Iterable[Node], needed: set[Node]) -> set[Node]:
    """Return the nodes that nothing uses once `replaced` have other nodes in their place.

    `needed` are the operands of those other nodes.

    A tensor that is written in place falls away with every view and every write, or not at all.
    """
    dead = set(replaced)
    pending = list(dead)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in dead or source in needed:
                continue
            group = _written_group(facts, source) or {source}
            group |= {user for node in group for user in node.users if _only_asserts(facts, user)}
            droppable = all(n not in needed and _is_droppable(facts, n) for n in group)
            if droppable and all(u in dead or u in group for n in group for u in n.users):
                dead |= group
                pending.extend(group)
    return dead


def _written_group(facts: Facts, node: Node) -> set[Node]:
    """Return all nodes that may share memory with `node` if it is written or is itself a write."""
    writes = (facts.calls[user].writes is node for user in node.users)
    if facts.calls[node].writes is None and not any(writes):
        return set()
    return set(facts.memory.sharing(node))


def _only_asserts(facts: Facts, node: Node) -> bool:
    """Tell whether a node does nothing but check the dtype and strides of a traced tensor."""
    return facts.calls[node].op == "_assert_tensor_metadata"


def _is_droppable(facts: Facts, node: Node) -> bool:
    call = facts.calls[node]
    is_call = node.op in ("call_function", "call_method")
    return is_call and call.known and call.op not in RANDOM and call.op != "set_grad_enabled"


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
