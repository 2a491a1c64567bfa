"""What falls away when an op computes the ids and the weights of a router.

Every use of the ids, and every use of the weights from where they are complete, is given to the op.
What only they were computed from falls away; scores that are read elsewhere as well stay. A tensor
that is written in place falls away with every view and every write before that point, or not at
all: what comes after it reads the op's tensor in its stead.
"""

from __future__ import annotations

from torch.fx import Node

from moe_graph.passes.router_values import Values, is_constant, is_droppable


def falls_away(values: Values, replaced: list[Node], needed: set[Node]) -> set[Node] | None:
    """Return the nodes that nothing uses once `replaced` have other nodes in their place.

    Args:
        values: the graph's values.
        replaced: nodes whose uses are given to new nodes.
        needed: what the new nodes read.

    Returns:
        The nodes, `replaced` among them; None where a replaced one cannot fall away.
    """
    dead = computed_from(values, replaced, needed)
    taken = {use for target in replaced for use in redirected_uses(values, target)}
    changed = True
    while changed:
        staying = {n for n in dead if not _can_go(values, n, dead, replaced, taken)}
        changed = bool(staying)
        dead -= staying
    return dead if dead.issuperset(replaced) else None


def redirected_uses(values: Values, target: Node) -> list[tuple[Node, Node]]:
    """Return (user, what it reads) for every use of the value of `target` from there on."""
    start = values.position(target)
    return [
        (user, alias)
        for alias in values.aliases(target)
        for user in alias.users
        if values.position(alias) <= start < values.position(user)
    ]


def computed_from(values: Values, results: list[Node], needed: set[Node]) -> set[Node]:
    """Return what `results` are computed from, back to `needed`, with the writes to any of it."""
    first = min(map(values.position, needed))
    last = max(map(values.position, results))
    found: set[Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        call = values.call(node)
        inside = is_constant(call) or first < values.position(node)
        if node in found or node in needed or not is_droppable(call):
            continue
        if inside and values.position(node) <= last:
            found.add(node)
            found.update(user for user in node.users if _is_idle(values, user))
            pending += [*node.all_input_nodes, *values.writers(node)]
    return found


def _is_idle(values: Values, node: Node) -> bool:
    """Tell whether nothing would miss a node: a result that nobody reads, a check while tracing."""
    call = values.call(node)
    return not node.users and call.writes is None and is_droppable(call)


def _can_go(
    values: Values,
    node: Node,
    dead: set[Node],
    replaced: list[Node],
    taken: set[tuple[Node, Node]],
) -> bool:
    if any(user not in dead and (user, node) not in taken for user in node.users):
        return False
    group = values.sharing(node)
    if not any(values.call(n).writes is not None or values.writers(n) for n in group):
        return True
    # What is made of a replaced tensor later on is made of the op's.
    end = max((values.position(n) for n in replaced if n in group), default=None)
    return all(n in dead for n in group if end is None or values.position(n) <= end)
