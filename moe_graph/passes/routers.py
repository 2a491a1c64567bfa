"""What to call the router of a layer; ``router_pass`` says what becomes of it.

The name lists how ids and weights are made: the scores' activation before the top-k
(``softmax-topk``), after it (``topk-softmax``), an added correction bias (``sigmoid-bias-topk``),
groups (``sigmoid-group-bias-topk``). ``unknown`` is a name too.
"""

from __future__ import annotations

from torch.fx import Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.facts import Root

_DEPTH = 24
_ACTIVATIONS = ("softmax", "sigmoid")


def router_name(facts: Facts, root: Root) -> str:
    """Return the name of the router that made the ids of `root`."""
    choice = _choice(facts, root.ids)
    if choice is None:
        return "unknown"
    op = facts.calls[choice].op
    before = _ancestors(facts, choice)
    names = {facts.calls[node].op for node in before}
    activation = next((name for name in _ACTIVATIONS if name in names), "")
    if not activation:
        after = {facts.calls[node].op for node in _descendants(choice)}
        later = next((name for name in _ACTIVATIONS if name in after), "")
        return f"{op}-{later}" if later else op
    parts = [activation]
    if any(
        facts.calls[node].op in ("topk", "max", "amax") for node in before if node is not choice
    ):
        parts.append("group")
    if any(_adds_parameter(facts, node, activation) for node in before):
        parts.append("bias")
    return "-".join([*parts, op])


def _choice(facts: Facts, ids: Node) -> Node | None:
    """Return the op that chose the ids."""
    node = ids
    for _ in range(_DEPTH):
        call = facts.calls[node]
        if call.op in ("topk", "argmax", "max", "sort", "argsort"):
            return node
        if call.op not in ("result", "slice", "cast", "reshape"):
            return None
        node = call["input"]
    return None


def _ancestors(facts: Facts, node: Node) -> set[Node]:
    """Return what the scores are computed from, back to the product that made them."""
    found: set[Node] = set()
    pending = list(node.all_input_nodes)
    while pending and len(found) < 4 * _DEPTH:
        source = pending.pop()
        if source in found or facts.calls[source].op in ("linear", "matmul", "bmm", "einsum"):
            continue
        found.add(source)
        pending.extend(source.all_input_nodes)
    return found


def _descendants(node: Node) -> set[Node]:
    """Return the first few generations of what is computed from the choice."""
    found: set[Node] = set()
    generation = {node}
    for _ in range(4):
        generation = {user for member in generation for user in member.users} - found
        found |= generation
    return found


def _adds_parameter(facts: Facts, node: Node, activation: str) -> bool:
    """Tell whether a node adds a buffer or parameter to activated scores."""
    call = facts.calls[node]
    if call.op != "add":
        return False
    operands = [operand for operand in (call["input"], call["other"]) if isinstance(operand, Node)]
    stored = any(operand.op in ("placeholder", "get_attr") for operand in operands)
    activated = any(
        facts.calls[source].op == activation
        for operand in operands
        for source in (operand, *_ancestors(facts, operand))
    )
    return stored and activated
