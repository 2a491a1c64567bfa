"""Places where gates are not zero, sorted by expert: the dispatcher of sparse mixtures.

::

    zeros.scatter(1, ids, weights)           gates
    torch.nonzero(gates)                     GatePlaces: (token, expert), by token
    places.sort(0)                           SortedPlaces, PlaceOfRow
    sorted.split(1, dim=1)[1]                ids by row
    places[order[:, 1], 0]                   TokenOfRow
    gates[token].gather(1, ids by row)       PerSlot
    (gates > 0).sum(0)                       Counts

A gate that is zero by chance is no place. So the weights have to be those of a softmax, a sigmoid
or an exponential: what of these is too small for its dtype adds nothing, and has no gradient.
"""

from __future__ import annotations

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, integer_literal, rule_of
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Axis,
    ExpertIds,
    Fact,
    Layout,
    Masks,
    Order,
    Outputs,
    PerSlot,
    Rows,
    ScatteredWeights,
    TokenOfRow,
)
from moe_graph.passes.facts_maps import values_of
from moe_graph.passes.side_facts import GatePlaces, PlaceOfRow, SortedPlaces
from moe_graph.passes.spellings import POSITIVE

_TOKEN, _EXPERT = 0, 1
"""Columns of the places."""


def nonzero_gates(call: Call, facts: Facts) -> Fact | None:
    """Return what the places of gates, or a mask of these, are."""
    fact = facts.of(call.get("input"))
    if not isinstance(fact, ScatteredWeights) or call.writes is not None:
        return None
    if not _is_positive(facts, fact.weights):
        return None
    if call.op == "nonzero" and call["as_tuple"] is not True:
        return GatePlaces(fact.root)
    other = call.literal("other") if "other" in call.args else call.literal("1")
    above = call.op in ("gt", "ne") and integer_literal(other) == 0
    return Masks(fact.root, (Axis.TOKEN, Axis.EXPERT)) if above else None


def _is_positive(facts: Facts, weights: Node) -> bool:
    call = facts.calls[weights]
    while call.op in ("cast", "reshape") and call.writes is None:
        call = facts.calls[call["input"]]
    return call.op in POSITIVE and call.writes is None


@rule_of(GatePlaces)
def _places(call: Call, facts: Facts) -> Fact | None:
    fact = facts.aside(call.get("input"))
    if not isinstance(fact, GatePlaces) or call.writes is not None:
        return None
    if call.op == "sort" and meta.wrap_dim(call["dim"], 2) == 0 and not call["descending"]:
        order = Order(fact.root, call.node, bool(call["stable"]))
        return Outputs((SortedPlaces(fact.root, order), PlaceOfRow(fact.root, order)))
    if call.op != "mixed_index" or not isinstance(call["index"], tuple) or len(call["index"]) != 2:
        return None
    rows, column = call["index"]
    place = facts.aside(rows)
    if not isinstance(place, PlaceOfRow) or not place.alone or place.root is not fact.root:
        return None
    if column == _TOKEN:
        return TokenOfRow(fact.root, place.order)
    return ExpertIds(fact.root, Layout.ROWS, place.order) if column == _EXPERT else None


@rule_of(SortedPlaces)
def _sorted_places(call: Call, facts: Facts) -> Fact | None:
    fact = facts.aside(call.get("input"))
    if not isinstance(fact, SortedPlaces) or call.writes is not None:
        return None
    by_row = ExpertIds(fact.root, Layout.ROWS, fact.order)
    by_column = call.op in ("split", "chunk") and meta.wrap_dim(call["dim"], 2) == 1
    if by_column and (call.get("chunks") == 2 or call.get("split_size") in (1, [1, 1])):
        return Outputs((None, by_row))
    return by_row if _is_column(call, _EXPERT) else None


@rule_of(PlaceOfRow)
def _place_of_row(call: Call, facts: Facts) -> Fact | None:
    fact = facts.aside(call.get("input"))
    if not isinstance(fact, PlaceOfRow) or fact.alone or call.writes is not None:
        return None
    return PlaceOfRow(fact.root, fact.order, True) if _is_column(call, _EXPERT) else None


def _is_column(call: Call, column: int) -> bool:
    """Tell whether a call is ``x[:, column]``."""
    if call.op == "select":
        index = integer_literal(call.literal("index"))
        return meta.wrap_dim(call["dim"], 2) == 1 and index == column
    if call.op != "slice" or len(call["index"]) != 2:
        return False
    everything, at = call["index"]
    return everything in (slice(None), Ellipsis) and at == column and not isinstance(at, bool)


def gates_of_rows(call: Call, facts: Facts) -> PerSlot | None:
    """Return what ``gates[token].gather(1, ids by row)`` is: the gate of each row."""
    rows, ids = facts.of(call["input"]), facts.of(call["index"])
    if not isinstance(rows, Rows) or not isinstance(ids, ExpertIds) or ids.order is None:
        return None
    dims = meta.shape(call["index"])
    if len(dims) != 2 or not meta.same_dim(dims[1], 1) or not rows.order.same(ids.order):
        return None
    return values_of(call, facts, rows.source, rows.order)
