"""A proved layer: what the rewrite puts other nodes in place of, and what stays."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.combine_weights import Weights, weights_of
from moe_graph.passes.endings import Ending, ending_of
from moe_graph.passes.facts import (
    Combined,
    ExpertIds,
    Order,
    PerSlot,
    Root,
    Rows,
)
from moe_graph.passes.gates import swiglu_input
from moe_graph.passes.loops import Loop
from moe_graph.passes.products import Product, experts_of, product_of
from moe_graph.passes.region import body_of, falls_away, wholes_of


@dataclass(frozen=True, eq=False)
class Layer:
    """A proved MoE layer.

    Attributes:
        anchor: node that stands for it in the report.
        order: the permutation that all of it is about.
        experts: number of experts of the weights.
        dispatches: gathers of rows, in graph order.
        products: products per expert, in graph order.
        folds: join of the experts' results -> their bodies.
        gates: multiplication -> product that it gates as SwiGlu does.
        per_slot: gathers of values per slot that the body reads.
        slot_values: tensors that the body reads in slot order as they are.
        ids: nodes of ids in the order of the rows that the body reads.
        rows: the rows that are combined, before the weights.
        weights: what multiplies the rows, None for a plain sum.
        ending: where the sum is.
        body: row-wise nodes that stay.
        dead: nodes that fall away.
    """

    anchor: Node
    order: Order
    experts: int
    dispatches: list[Node]
    products: list[Product]
    folds: dict[Node, Loop]
    gates: dict[Node, Node]
    per_slot: list[Node]
    slot_values: list[Node]
    ids: list[Node]
    rows: Node
    weights: Weights | None
    ending: Ending
    body: set[Node]
    dead: set[Node]

    @property
    def root(self) -> Root:
        """The expert ids that all of it is about."""
        return self.order.root

    @property
    def end(self) -> Node:
        """The node that completes the sum."""
        return self.ending.end

    @property
    def form(self) -> str:
        """How the source computes the experts."""
        return "sorted-grouped" if self.order.grouped else "gathered-weights"


def anchor_of(facts: Facts, combined: Combined) -> Node:
    """Return the node that stands for a layer: the sort, or else the first product."""
    body = combined.contribution.body
    if body.order.grouped:
        return body.order.maker
    return min(body.products, key=facts.position.__getitem__)


def layer_of(facts: Facts, total: Node, combined: Combined, folds: dict[Node, Loop]) -> Layer:
    """Return the layer that ends in `total`; `folds` are the loops within it."""
    share = combined.contribution
    order = share.body.order
    leaves = sorted(share.body.leaves, key=facts.position.__getitem__)
    dispatches = [leaf for leaf in leaves if isinstance(facts.given[leaf], Rows)]
    by_slot = {leaf: fact for leaf in leaves if isinstance(fact := facts.given[leaf], PerSlot)}
    per_slot = [leaf for leaf, fact in by_slot.items() if fact.source is not leaf]
    nodes = sorted(share.body.products, key=facts.position.__getitem__)
    products = [product_of(facts, node) for node in nodes if node not in folds]
    body = body_of(facts, share.rows, share.body.leaves)
    in_order = sorted(body, key=facts.position.__getitem__)
    gates = {n: source for n in in_order if (source := swiglu_input(facts, n)) in body}
    ending = ending_of(facts, total, combined)
    end = ending.end
    weights = weights_of(facts, share, end)

    replaced = {end, *dispatches, *gates, *folds}
    replaced |= {n for p in products for n in (p.result, p.biased) if n is not None}
    needed = _operands(facts, products, gates, [*dispatches, *per_slot])
    needed |= {order.root.ids, share.rows}
    for join, loop in folds.items():
        needed |= wholes_of(facts, join)
        needed |= {node for stack in loop.parameters.values() for node in stack.sources}
    needed |= {weights.node} if weights is not None else set()
    needed |= {combined.base} if combined.base is not None else set()
    # A bias that went into a product, or weights that went into the combine, need no rebuilding.
    dead = falls_away(facts, replaced, needed, ending.served)
    left = [n for n in in_order if n not in dead]
    ids = _ids_read(facts, left)
    sorted_ids = [n for n in ids if order.grouped]
    per_slot = [leaf for leaf in per_slot if leaf not in dead]
    dead = falls_away(facts, {*replaced, *per_slot, *sorted_ids}, needed, ending.served)
    read = {source for node in left for source in node.all_input_nodes}
    slot_values = [leaf for leaf in by_slot if leaf not in per_slot and leaf in read]
    experts = experts_of(facts, nodes[0])
    assert isinstance(experts, int), "the checks of a layer come first"
    return Layer(
        anchor_of(facts, combined),
        order,
        experts,
        dispatches,
        products,
        folds,
        gates,
        per_slot,
        slot_values,
        ids,
        share.rows,
        weights,
        ending,
        body - dead,
        dead,
    )


def _operands(
    facts: Facts, products: list[Product], gates: dict[Node, Node], gathers: list[Node]
) -> set[Node]:
    """Return what the new products, gates and gathers read."""
    operands = {p.rows for p in products}
    operands |= {p.weight for p in products} | {p.bias for p in products if p.bias is not None}
    operands |= set(gates.values())
    for gather in gathers:
        fact = facts.given[gather]
        if isinstance(fact, Rows | PerSlot):
            operands.add(fact.source)
    return operands


def _ids_read(facts: Facts, body: list[Node]) -> list[Node]:
    """Return the nodes of ids in the order of the rows that the remaining body reads."""
    return list(
        dict.fromkeys(
            source
            for node in body
            for source in node.all_input_nodes
            if isinstance(facts.given.get(source), ExpertIds)
        )
    )
