"""Routing maps: a token's experts as a row of zeros and ones, sorted or selected expert by expert.

::

    map.T.reshape(-1).argsort(descending=True, stable=True)[:T * K]      PlacesInMap
    places % T, places // T                                              TokenOfRow, ids by row
    arange(T).expand(E, T).masked_select(map.T)                          TokenOfRow
    p.T.reshape(-1)[places], p.T.masked_select(map.T), p[mask_e, e]      PerSlot of p ``[T, E]``

Expert by expert, tokens ascending: the same order as that of a stable sort of the ids.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Arange,
    Axis,
    ChoiceOfRow,
    ExpertIds,
    Fact,
    FlatMap,
    Layout,
    Masks,
    Order,
    PerSlot,
    PlacesInMap,
    ScatteredWeights,
    SortedMap,
    TokenOfRow,
)
from moe_graph.passes.facts_rowwise import elementwise
from moe_graph.passes.misses import Miss

BY_EXPERT = (Axis.EXPERT, Axis.TOKEN)


def flat_map(fact: Masks, new: tuple[Any, ...]) -> FlatMap | None:
    """Return what a map ``[E, T]`` is in one dimension."""
    return FlatMap(fact.root) if fact.axes == BY_EXPERT and len(new) == 1 else None


def sorted_map(call: Call, fact: FlatMap) -> SortedMap | None:
    """Return what a descending sort of a flat map is: the places of its ones come first."""
    if not call["descending"] or not call["stable"]:
        return None
    return SortedMap(fact.root, Order(fact.root, call.node, stable=True))


def first_places(call: Call, fact: SortedMap) -> PlacesInMap | None:
    """Return the places of the ones: the first ``T * K`` of a sorted map."""
    index = call["index"]
    if len(index) != 1 or not isinstance(index[0], slice):
        return None
    from_start = index[0].start in (None, 0) and index[0].step in (None, 1)
    fits = meta.same_dim(meta.shape(call.node)[0], fact.root.slots)
    return PlacesInMap(fact.root, fact.order) if from_start and fits else None


def quotient_of_places(call: Call, fact: PlacesInMap) -> ExpertIds | None:
    """Return what ``places // T`` is: the expert of each row."""
    tokens = meta.same_dim(call.literal("other"), fact.root.tokens)
    floored = call["rounding_mode"] is not None
    return ExpertIds(fact.root, Layout.ROWS, fact.order) if tokens and floored else None


@rule("remainder")
def _remainder(call: Call, facts: Facts) -> Fact | Miss | None:
    fact, divisor = facts.of(call["input"]), call.literal("other")
    if isinstance(fact, PlacesInMap):
        tokens = meta.same_dim(divisor, fact.root.tokens)
        return TokenOfRow(fact.root, fact.order) if tokens else None
    if isinstance(fact, Order):
        choices = fact.expert is not None and meta.same_dim(divisor, fact.root.top_k)
        return ChoiceOfRow(fact.root, fact) if choices else None
    return elementwise(call, facts)


@rule("masked_select")
def _masked_select(call: Call, facts: Facts) -> Fact | None:
    mask, source = facts.of(call["mask"]), call["input"]
    if not isinstance(mask, Masks) or mask.axes != BY_EXPERT:
        return None
    if not meta.same_shape(meta.shape(source), meta.shape(call["mask"])):
        return None
    order = Order(mask.root, call.node, stable=True)
    if _counts_tokens(facts, source):
        return TokenOfRow(mask.root, order)
    table = _swapped(facts, source, call)
    return values_of(call, facts, table, order) if table is not None else None


def _counts_tokens(facts: Facts, source: Node) -> bool:
    """Tell whether every row of a tensor ``[E, T]`` is ``0 .. T - 1``."""
    expand = facts.calls[source]
    if expand.op != "expand" or expand.writes is not None:
        return False
    row = expand["input"]
    if facts.calls[row].op != "reshape" or not meta.same_dim(meta.shape(row)[0], 1):
        return isinstance(facts.of(row), Arange) and len(meta.shape(row)) == 1
    return isinstance(facts.of(facts.calls[row]["input"]), Arange) and len(meta.shape(row)) == 2


def gather_places(call: Call, facts: Facts, source: Node, places: PlacesInMap) -> Fact | None:
    """Return what ``p.T.reshape(-1)[places]`` is."""
    flat = facts.calls[source]
    while flat.op == "reshape" and flat.writes is None:
        table = _swapped(facts, flat["input"], call)
        if table is not None:
            return values_of(call, facts, table, places.order)
        flat = facts.calls[flat["input"]]
    return None


def _swapped(facts: Facts, node: Node, reader: Call) -> Node | None:
    """Return the matrix that `node` is the transpose of where that is the same at `reader`."""
    while facts.calls[node].op == "reshape" and facts.calls[node].writes is None:
        behind = facts.calls[node]["input"]
        if not meta.same_shape(meta.shape(behind), meta.shape(node)):
            break
        node = behind
    permute = facts.calls[node]
    if permute.op != "permute" or permute.writes is not None or len(meta.shape(node)) != 2:
        return None
    span = facts.position[node], facts.position[reader.node]
    table: Node = permute["input"]
    return table if facts.memory.written_between(table, *span) is None else None


def values_of(call: Call, facts: Facts, table: Node, order: Order) -> PerSlot | None:
    """Return the values of a table ``[T, E]`` at the token and the expert of each row."""
    root, fact = order.root, facts.of(table)
    dims = meta.shape(table)
    if len(dims) != 2 or not meta.same_dim(dims[0], root.tokens) or root.bound is None:
        return None
    if not isinstance(dims[1], int) or dims[1] < root.bound:
        return None
    if isinstance(fact, ScatteredWeights) and fact.root is root:
        return PerSlot(root, order, fact.weights, call.node)
    return PerSlot(root, order, table, call.node, by_expert=True) if fact is None else None
