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
from moe_graph.passes.dense_layer import DenseLayer, dense_layer_of
from moe_graph.passes.endings import other_reader
from moe_graph.passes.facts import (
    AboutRoot,
    Combined,
    Ends,
    Gathering,
    Joined,
    Root,
    Rows,
    RowWise,
    SlotProduct,
    Unpermuted,
    Unrolled,
    WeightsOfSlots,
)
from moe_graph.passes.layer import Layer, anchor_of, layer_of
from moe_graph.passes.loop_layer import LoopLayer, loop_layer_of
from moe_graph.passes.loops import Loop, loop_of
from moe_graph.passes.misses import Miss
from moe_graph.passes.side_facts import DenseSum
from moe_graph.passes.unread import unread_layers


@dataclass(frozen=True, eq=False)
class Kept:
    """A layer that stays as it is.

    Attributes:
        anchor: node that stands for the layer.
        miss: the check that failed.
    """

    anchor: Node
    miss: Miss


def find_layers(graph: Graph, facts: Facts) -> list[Layer | LoopLayer | DenseLayer | Kept]:
    """Return what there is of MoE layers in a graph, in graph order."""
    found: dict[Node, Layer | LoopLayer | DenseLayer | Kept] = {}
    settled: set[Root] = set()
    written: set[Combined] = set()
    taken: set[Node] = set()
    for node in graph.nodes:
        fact = facts.given.get(node)
        if isinstance(fact, DenseSum):
            settled.add(fact.root)
            dense = dense_layer_of(facts, node, fact)
            found[node] = Kept(node, dense) if isinstance(dense, Miss) else dense
            continue
        if not isinstance(fact, Combined) or fact in written or not _is_layer(facts, node, fact):
            continue
        if facts.calls[node].writes is not None:
            # What reads the tensor from here on reads the sum, and has its fact.
            written.add(fact)
        settled.add(fact.root)
        entry = _layer_or_kept(facts, node, fact, taken)
        if entry is not None:
            found[node] = entry
        if isinstance(entry, Layer | LoopLayer | DenseLayer):
            taken |= entry.body | entry.dead
    choosing = {
        facts.calls[miss.node]["input"]: miss
        for miss in reversed(facts.misses)
        if miss.check == "expert-choice"
    }
    found |= {miss.node: Kept(miss.node, miss) for miss in choosing.values()}
    for root, product in _roots_of_products(graph, facts).items():
        if root not in settled:
            settled.add(root)
            found[product] = Kept(product, _nearest_miss(facts, root))
    for miss in unread_layers(graph, facts, [*(root.ids for root in settled), *found]):
        found[miss.node] = Kept(miss.node, miss)
    return [found[node] for node in sorted(found, key=facts.position.__getitem__)]


def _layer_or_kept(
    facts: Facts, node: Node, fact: Combined, taken: set[Node]
) -> Layer | LoopLayer | DenseLayer | Kept | None:
    if isinstance(fact.contribution, Unrolled):
        loop = loop_layer_of(facts, node, fact)
        return Kept(anchor_of(facts, fact), loop) if isinstance(loop, Miss) else loop
    anchor = anchor_of(facts, fact)
    miss = failed_check(facts, node, fact)
    if miss is not None:
        return Kept(anchor, miss)
    folds = _folds(facts, fact)
    if isinstance(folds, Miss):
        return Kept(anchor, folds)
    layer = layer_of(facts, node, fact, folds)
    miss = interior_user(facts, layer, taken) or other_reader(facts, layer.ending, layer.dead, fact)
    return layer if miss is None else Kept(anchor, miss)


def _folds(facts: Facts, combined: Combined) -> dict[Node, Loop] | Miss:
    """Return the loops over experts within a layer, or why one of them is none."""
    folds: dict[Node, Loop] = {}
    for product in sorted(combined.contribution.body.products, key=facts.position.__getitem__):
        fact = facts.given[product]
        if not isinstance(fact, Joined):
            continue
        loop = loop_of(facts, fact.parts)
        if loop is None:
            got = "one product for the rows of all experts"
            return Miss("equal-experts", product, combined.root, got, "weights of every expert")
        if isinstance(loop, Miss):
            return loop
        folds[product] = loop
    return folds


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
    # One product of gathered weights or of one expert alone says little: a layer has several.
    for root, product in _several(graph, facts).items():
        roots.setdefault(root, product)
    for miss in facts.misses:
        if miss.check in ("split-sizes", "dense-gate") and miss.root is not None:
            roots.setdefault(miss.root, miss.node)
    return roots


def _several(graph: Graph, facts: Facts) -> dict[Root, Node]:
    """Return the ids that choose several matrices per slot, or rows of several experts."""
    first: dict[Root, Node] = {}
    chosen: dict[Root, set[object]] = {}
    for node in graph.nodes:
        fact = facts.given.get(node)
        if isinstance(fact, WeightsOfSlots):
            chosen.setdefault(fact.root, set()).add(node)
        elif isinstance(fact, RowWise) and fact.products and fact.order.expert is not None:
            chosen.setdefault(fact.root, set()).add(fact.order.expert)
        else:
            continue
        first.setdefault(fact.root, node)
    return {root: first[root] for root, found in chosen.items() if len(found) > 1}


def _root_of(facts: Facts, value: object) -> Root | None:
    if not isinstance(value, Node):
        return None
    fact, cause = facts.given.get(value), facts.cause(value)
    if isinstance(fact, RowWise | Rows | Ends | Unpermuted):
        return fact.root
    return cause.root if cause is not None else None


def _missing_experts(last: Node, fact: Gathering) -> Miss:
    experts = sorted(fact.shares)
    return Miss(
        "experts",
        last,
        fact.root,
        f"the sum over experts {experts[0]} to {experts[-1]}, {len(experts)} in all",
        f"one contribution of each expert that the router chooses among, {fact.root.bound}",
    )


def _nearest_miss(facts: Facts, root: Root) -> Miss:
    """Return the failed check that came closest to a layer."""
    gathering = [(n, f) for n, f in facts.given.items() if isinstance(f, Gathering)]
    last_sum = next(((n, f) for n, f in reversed(gathering) if f.root is root), None)
    misses = [miss for miss in facts.misses if miss.root is root]
    if last_sum is not None and not misses:
        return _missing_experts(*last_sum)
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
