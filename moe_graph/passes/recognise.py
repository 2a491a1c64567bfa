"""Layers out of facts: a dispatch, a row-wise body with products per expert, a combine, one root.

What fails a check of the whole layer is kept with that check. Ids that reach products per expert
but no combine are kept with the check that failed last. Anything with no such product is no MoE
layer, and nothing is said about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.checks import failed_check, interior_user
from moe_graph.passes.facts import (
    AboutRoot,
    Combined,
    Ends,
    Root,
    Rows,
    RowsOfExpert,
    RowWise,
    SlotProduct,
    Unpermuted,
    WeightsOfSlots,
)
from moe_graph.passes.layer import Layer, anchor_of, layer_of
from moe_graph.passes.misses import Miss


@dataclass(frozen=True, eq=False)
class Kept:
    """A layer that stays as it is.

    Attributes:
        anchor: node that stands for the layer.
        miss: the check that failed.
    """

    anchor: Node
    miss: Miss


def find_layers(graph: Graph, facts: Facts) -> list[Layer | Kept]:
    """Return what there is of MoE layers in a graph, in graph order."""
    found: dict[Node, Layer | Kept] = {}
    settled: set[Root] = set()
    taken: set[Node] = set()
    for node in graph.nodes:
        fact = facts.given.get(node)
        if not isinstance(fact, Combined) or not _is_layer(facts, node, fact):
            continue
        settled.add(fact.root)
        found[node] = entry = _layer_or_kept(facts, node, fact, taken)
        if isinstance(entry, Layer):
            taken |= entry.body | entry.dead
    for root, product in _roots_of_products(graph, facts).items():
        if root not in settled:
            found[product] = Kept(product, _nearest_miss(facts, root))
    return [found[node] for node in sorted(found, key=facts.position.__getitem__)]


def _layer_or_kept(facts: Facts, node: Node, fact: Combined, taken: set[Node]) -> Layer | Kept:
    anchor = anchor_of(facts, fact)
    miss = failed_check(facts, node, fact)
    if miss is not None:
        return Kept(anchor, miss)
    layer = layer_of(facts, node, fact)
    miss = interior_user(facts, layer, taken)
    return layer if miss is None else Kept(anchor, miss)


def _is_layer(facts: Facts, node: Node, fact: Combined) -> bool:
    """Tell whether rows of experts are combined here, and the result is not just reshaped."""
    last = not any(isinstance(facts.given.get(user), Combined) for user in node.users)
    return last and bool(fact.contribution.body.products)


def _roots_of_products(graph: Graph, facts: Facts) -> dict[Root, Node]:
    """Return the ids that reach products per expert, with the first such product."""
    roots: dict[Root, Node] = {}
    for node in graph.nodes:
        call, fact = facts.calls[node], facts.given.get(node)
        if isinstance(fact, SlotProduct):
            roots.setdefault(fact.root, node)
        elif call.op == "grouped_mm":
            root = _root_of(facts, call["input"]) or _root_of(facts, call["offs"])
            if root is not None:
                roots.setdefault(root, node)
    for miss in facts.misses:
        if miss.check == "form" and miss.root is not None and _has_several(facts, miss.root):
            roots.setdefault(miss.root, miss.node)
    return roots


def _has_several(facts: Facts, root: Root) -> bool:
    """Tell whether several experts' rows, or several weights by slot, come from the ids.

    One product alone says little: a layer has two or more.
    """
    about = [fact for fact in facts.given.values() if isinstance(fact, AboutRoot)]
    experts = {f.expert for f in about if isinstance(f, RowsOfExpert) and f.root is root}
    weights = [f for f in about if isinstance(f, WeightsOfSlots) and f.root is root]
    return len(experts) > 1 or len(weights) > 1


def _root_of(facts: Facts, value: object) -> Root | None:
    if not isinstance(value, Node):
        return None
    fact, cause = facts.given.get(value), facts.cause(value)
    if isinstance(fact, RowWise | Rows | Ends | Unpermuted):
        return fact.root
    return cause.root if cause is not None else None


def _nearest_miss(facts: Facts, root: Root) -> Miss:
    """Return the failed check that came closest to a layer."""
    misses = [miss for miss in facts.misses if miss.root is root]
    if misses:
        return max(misses, key=lambda miss: facts.position[miss.node])
    about = (n for n, f in facts.given.items() if isinstance(f, AboutRoot) and f.root is root)
    last = max(about, key=facts.position.__getitem__)
    user = next((user for user in last.users if user not in facts.given), last)
    return facts.cause(user) or Miss(
        "combine",
        user,
        root,
        lambda: f"{facts.calls[user].op} of {last.name} ({type(facts.given[last]).__name__})",
        "rows put back by the inverse permutation and summed over top_k, or added by token",
    )
