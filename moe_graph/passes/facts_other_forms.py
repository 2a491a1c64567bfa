"""Layers that are no sorted-grouped ones: read far enough to say what they are.

::

    linear(x[where(ids == e)], w[e])   one product per expert, in a loop
    ids_by_row >= experts              rows of experts on other devices, masked out

They end in a :class:`~moe_graph.passes.misses.Miss` of the check ``form`` or
``expert-parallel-sentinel``.
"""

from __future__ import annotations

from dataclasses import replace

from moe_graph.passes.analysis import Facts, integer_literal, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    ExpertIds,
    Fact,
    Hit,
    Layout,
    MasksByExpert,
    OneHot,
    Outputs,
    RowsOfExpert,
    WeightsOfSlots,
)
from moe_graph.passes.facts_rowwise import elementwise, row_local
from moe_graph.passes.misses import Miss
from moe_graph.passes.products import swaps_last_dims

_GROUPED = "rows sorted by expert and one grouped product for all experts"
_HINT = 'with transformers, set experts_implementation="grouped_mm"'


@rule("eq")
def _eq(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    expert = integer_literal(call.literal("other"))
    if isinstance(fact, ExpertIds) and expert is not None:
        return Hit(fact.root, expert)
    return elementwise(call, facts)


@rule("ge")
def _ge(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if not isinstance(fact, ExpertIds) or fact.layout is not Layout.ROWS:
        return elementwise(call, facts)
    return Miss(
        "expert-parallel-sentinel",
        call.node,
        fact.root,
        lambda: f"ids compared with {call['other']}: an expert-parallel layer",
        "experts that are all on this device",
    )


@rule("select")
def _select(call: Call, facts: Facts) -> Fact | None:
    fact, expert = facts.of(call["input"]), integer_literal(call.literal("index"))
    return hit_of_mask(fact, expert)


def hit_of_mask(fact: Fact | None, expert: object) -> Hit | None:
    """Return the slots of one expert out of masks by expert."""
    literal = isinstance(expert, int) and not isinstance(expert, bool)
    return Hit(fact.root, expert) if literal and isinstance(fact, MasksByExpert) else None  # type: ignore[arg-type]


@rule("permute")
def _permute(call: Call, facts: Facts) -> Fact | None:
    fact = facts.of(call["input"])
    if isinstance(fact, WeightsOfSlots):
        return replace(fact, transposed=not fact.transposed) if swaps_last_dims(call) else None
    return MasksByExpert(fact.root) if isinstance(fact, OneHot) else None


@rule("nonzero")
def _nonzero(call: Call, facts: Facts) -> Fact | None:
    return _indices_of(facts.of(call["input"]))


@rule("where")
def _where(call: Call, facts: Facts) -> Fact | Miss | None:
    if call.get("input") is None:
        return _indices_of(facts.of(call["condition"]))
    return elementwise(call, facts)


def _indices_of(fact: Fact | None) -> Fact | None:
    return Outputs((fact, fact)) if isinstance(fact, Hit) else None


@rule("linear")
def _linear(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if not isinstance(fact, RowsOfExpert):
        return row_local(call, facts)
    got = f"a product for expert {fact.expert} alone"
    return Miss("form", call.node, fact.root, got, _GROUPED, _HINT)
