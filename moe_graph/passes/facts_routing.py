"""Ids, permutations and counts: what the router chose and where every slot goes.

::

    topk(scores)[1]            ExpertIds [T, K]
    sort(ids.view(-1))         ExpertIds by row, Order
    argsort(order)             Inverse
    order // K                 TokenOfRow
    histc / bincount / one_hot.sum / scatter_add      Counts
    cumsum(counts)             Ends
"""

from __future__ import annotations

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, integer_literal, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Arange,
    Choice,
    Constant,
    Counts,
    Ends,
    ExpertIds,
    Fact,
    FlatMap,
    Inverse,
    Layout,
    Order,
    Outputs,
    PlacesInMap,
    Repeated,
    TokenOfRow,
    TokenOfSlot,
)
from moe_graph.passes.facts_maps import quotient_of_places, sorted_map
from moe_graph.passes.facts_rowwise import elementwise, row_local
from moe_graph.passes.misses import Miss


@rule("topk")
def _topk(call: Call, facts: Facts) -> Fact | None:
    return Outputs((None, _choice_of_last_dim(call))) if _choice_of_last_dim(call) else None


@rule("argmax")
def _argmax(call: Call, facts: Facts) -> Fact | None:
    return _choice_of_last_dim(call) if call["keepdim"] else None


@rule("max")
def _max(call: Call, facts: Facts) -> Fact | None:
    choice = _choice_of_last_dim(call) if call["keepdim"] else None
    return Outputs((None, choice)) if choice else None


def _choice_of_last_dim(call: Call) -> Choice | None:
    """Return the choice that an op makes along the last dimension of a matrix of scores."""
    dims = meta.shape(call["input"])
    if len(dims) < 2 or meta.wrap_dim(call["dim"], len(dims)) != len(dims) - 1:
        return None
    return Choice(dims[-1], distinct=True) if isinstance(dims[-1], int) else None


@rule("sort", "argsort")
def _sort(call: Call, facts: Facts) -> Fact | Miss | None:
    scores = call["input"]
    fact = facts.of(scores)
    if isinstance(fact, FlatMap):
        places = sorted_map(call, fact)
        return _sorted(call, None, places) if places else None
    if len(meta.shape(scores)) != 1:
        choice = None if meta.is_integer(scores) else _choice_of_last_dim(call)
        return _sorted(call, None, choice) if choice else None
    if fact is None and meta.is_integer(scores) and facts.cause(scores) is None:
        fact = facts.ids_without_bound(scores)
    if isinstance(fact, Order) and fact.expert is None and not call["descending"]:
        return _sorted(call, Arange(), Inverse(fact.root, fact))
    if not isinstance(fact, ExpertIds) or fact.layout is not Layout.SLOTS:
        return None
    if call["descending"]:
        return Miss(
            "sort-direction", call.node, fact.root, "a descending sort", "experts in rising order"
        )
    order = Order(fact.root, call.node, bool(call["stable"]))
    return _sorted(call, ExpertIds(fact.root, Layout.ROWS, order), order)


def _sorted(call: Call, values: Fact | None, indices: Fact) -> Fact:
    return Outputs((values, indices)) if call.op == "sort" else indices


@rule("div")
def _div(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if isinstance(fact, PlacesInMap):
        return quotient_of_places(call, fact)
    if not isinstance(fact, Order | Arange) or call["rounding_mode"] is None:
        return elementwise(call, facts)
    divisor = integer_literal(call.literal("other"))
    if isinstance(fact, Arange):
        return TokenOfSlot(divisor) if divisor else None
    if divisor != fact.root.top_k:
        return Miss(
            "divisor",
            call.node,
            fact.root,
            lambda: f"the order of the slots divided by {call['other']}",
            lambda: f"divided by top_k = {fact.root.top_k}, the last dimension of the ids",
        )
    return TokenOfRow(fact.root, fact)


@rule("histc")
def _histc(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if not isinstance(fact, ExpertIds):
        return None
    bins, low, high = (integer_literal(call.literal(name)) for name in ("bins", "min", "max"))
    if bins is None or low != 0 or high not in (bins - 1, bins):
        return Miss(
            "histogram-range",
            call.node,
            fact.root,
            lambda: f"histc(bins={call['bins']}, min={call['min']}, max={call['max']})",
            "one bin per expert: min=0 and max=bins-1 or bins",
        )
    return Counts(fact.root, bins)


@rule("bincount")
def _bincount(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if not isinstance(fact, ExpertIds) or call["weights"] is not None:
        return None
    length = integer_literal(call.literal("minlength"))
    if length is None or fact.root.bound is None or length < fact.root.bound:
        return Miss(
            "histogram-range",
            call.node,
            fact.root,
            lambda: f"bincount(minlength={call['minlength']})",
            lambda: f"minlength equal to the number of experts, {fact.root.bound}",
        )
    return Counts(fact.root, length)


def counts_by_scatter(call: Call, facts: Facts, ids: ExpertIds) -> Fact | None:
    """Return the counts that adding a one at the expert of each slot makes."""
    ones, base = facts.of(call["src"]), facts.of(call["input"])
    dims = meta.shape(call["input"])
    if len(dims) != 1 or not isinstance(dims[0], int) or ids.layout is Layout.TOKENS:
        return None
    if not (isinstance(ones, Constant) and ones.value == 1):
        return None
    if not (isinstance(base, Constant) and base.value == 0):
        return None
    return Counts(ids.root, dims[0])


@rule("searchsorted")
def _searchsorted(call: Call, facts: Facts) -> Fact | None:
    ids, experts = facts.of(call["sorted_sequence"]), facts.of(call["input"])
    if not isinstance(ids, ExpertIds) or ids.layout is not Layout.ROWS:
        return None
    length = meta.shape(call["input"])[0] if isinstance(experts, Arange) else None
    if not isinstance(length, int) or not (call["right"] is True or call["side"] == "right"):
        return None
    return Ends(ids.root, length)


@rule("cumsum")
def _cumsum(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if isinstance(fact, Counts) and meta.wrap_dim(call["dim"], 1) == 0:
        return Ends(fact.root, fact.experts)
    return row_local(call, facts)


@rule("arange")
def _arange(call: Call, facts: Facts) -> Fact | None:
    return Arange() if call["start"] == 0 and call["step"] == 1 else None


@rule("zeros", "zeros_like", "new_zeros")
def _zeros(call: Call, facts: Facts) -> Fact:
    return Constant(0.0)


@rule("ones", "ones_like", "new_ones")
def _ones(call: Call, facts: Facts) -> Fact:
    return Constant(1.0)


@rule("empty", "empty_like", "new_empty")
def _empty(call: Call, facts: Facts) -> Fact:
    return Constant(None)


@rule("full", "full_like", "new_full")
def _full(call: Call, facts: Facts) -> Fact | None:
    value = call["fill_value"]
    return Constant(float(value)) if isinstance(value, int | float) else None


@rule("repeat_interleave")
def _repeat_interleave(call: Call, facts: Facts) -> Fact | None:
    times = integer_literal(call.literal("repeats"))
    if times is None:
        return None
    if isinstance(facts.of(call["input"]), Arange):
        return TokenOfSlot(times)
    return Repeated(call["input"], times, call.node) if call["dim"] == 0 else None
