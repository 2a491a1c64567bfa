"""Layers that choose experts and multiply with the weights of all of them, in a form no rule reads.

::

    ids = scores.topk(k)[1];  ...one-hot tensors, slots, buffers...;  bmm(buffer, w)   # w [E, ., .]

Nothing is proved of what is between. It is said where it is, so that no layer is passed over in
silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.misses import Miss

_CHOICES = ("argmax", "max", "topk")
_PRODUCTS = ("bmm", "einsum", "matmul")
_GATHERS = ("index", "index_select")
_VIEWS = ("cast", "permute", "reshape", "slice")


def unread_layers(graph: Graph, facts: Facts, spoken_of: Iterable[Node]) -> Iterator[Miss]:
    """Yield a miss per choice of experts whose layer no form fits.

    A product belongs to the last choice before it that it depends on. `spoken_of` are nodes of
    layers that are in the report already, which belong to their choices in the same way.
    """
    weights = _weights_of_all_experts(graph, facts)
    if not weights:
        return
    choices = _last_choices(graph, facts)
    known = {choices.get(node) for node in spoken_of}
    for product, experts in weights.items():
        choice = choices.get(product)
        if choice is None or choice in known:
            continue
        if _chosen_among(facts.calls[choice]) == experts:
            known.add(choice)
            yield _miss(product, choice)


def _last_choices(graph: Graph, facts: Facts) -> dict[Node, Node]:
    """Return node -> the last choice that it depends on, or is."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        before = (found[source] for source in node.all_input_nodes if source in found)
        choice = max(before, key=facts.position.__getitem__, default=None)
        if _chosen_among(facts.calls[node]) is not None:
            choice = node
        if choice is not None:
            found[node] = choice
    return found


def _miss(product: Node, choice: Node) -> Miss:
    return Miss(
        "form",
        product,
        None,
        lambda: f"weights of all experts behind {choice.name}, and no form in between",
        "one of the forms that docs/recognition.md lists",
        "sort the tokens by expert, gather the weights, or loop over the experts",
    )


def _weights_of_all_experts(graph: Graph, facts: Facts) -> dict[Node, int]:
    """Return product -> number of experts, of the products with stacked weights."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if facts.calls[node].op not in _PRODUCTS or not facts.calls[node].known:
            continue
        for operand in node.all_input_nodes:
            table = _table_behind(facts, operand) if meta.is_tensor(operand) else None
            if table is not None:
                found[node] = meta.shape(table)[0]  # type: ignore[assignment]
    return found


def _table_behind(facts: Facts, node: Node) -> Node | None:
    """Return the input ``[E, ., .]`` of the graph that a node views or gathers matrices of."""
    while node.op != "placeholder" and facts.calls[node].op in (*_VIEWS, *_GATHERS):
        node = node.all_input_nodes[0]
    if node.op not in ("get_attr", "placeholder") or not meta.is_tensor(node):
        return None
    dims = meta.shape(node)
    return node if len(dims) == 3 and all(isinstance(dim, int) for dim in dims) else None


def _chosen_among(call: Call) -> int | None:
    """Return how many there are to choose among along the last dimension, None for no choice."""
    if call.op not in _CHOICES or not call.known or not meta.is_tensor(call.get("input")):
        return None
    dims = meta.shape(call["input"])
    last = len(dims) > 1 and meta.wrap_dim(call.get("dim"), len(dims)) == len(dims) - 1
    return dims[-1] if last and isinstance(dims[-1], int) and dims[-1] > 1 else None
