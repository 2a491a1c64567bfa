"""Gathers by routing indices: rows into grouped order, weights with them, and rows back.

::

    x[order // K]                        Rows
    x.repeat_interleave(K, 0)[order]     Rows
    weights.view(-1)[order]              PerSlot
    bias[ids by row]                     PerExpert
    w[ids by slot]                       WeightsOfSlots
    y[inverse]                           Unpermuted
    y_slots[order] = y                   Unpermuted
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Arange,
    Constant,
    ExpertIds,
    Fact,
    Hit,
    Inverse,
    Layout,
    Order,
    PerExpert,
    PerSlot,
    PlacesInMap,
    Repeated,
    Rows,
    TokenOfRow,
    TokenOfSlot,
    Unpermuted,
    slot_order,
)
from moe_graph.passes.facts_choice import chosen_tokens
from moe_graph.passes.facts_combine import add_by_token, contribution
from moe_graph.passes.facts_gathered import gather_weights
from moe_graph.passes.facts_loops import (
    gather_hit,
    gather_pair,
    gather_slots,
    put_rows_of_expert,
)
from moe_graph.passes.facts_maps import gather_places
from moe_graph.passes.facts_masks import map_by_scatter
from moe_graph.passes.facts_nonzero import gates_of_rows
from moe_graph.passes.facts_rowwise import as_row_wise, grouped_order, row_local
from moe_graph.passes.misses import Miss


@rule("index")
def _index(call: Call, facts: Facts) -> Fact | Miss | None:
    indices = call["indices"]
    if len(indices) == 2 and all(map(meta.is_tensor, indices)):
        return gather_pair(call, facts, call["input"], indices)
    if len(indices) != 1 or not meta.is_tensor(indices[0]):
        return None
    return _gather_rows(call, facts, call["input"], indices[0])


@rule("index_select")
def _index_select(call: Call, facts: Facts) -> Fact | Miss | None:
    if meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) != 0:
        return None
    return _gather_rows(call, facts, call["input"], call["index"])


@rule("gather")
def _gather(call: Call, facts: Facts) -> Fact | Miss | None:
    dims, index = meta.shape(call["input"]), meta.shape(call["index"])
    if meta.wrap_dim(call["dim"], len(dims)) != 0:
        gates = gates_of_rows(call, facts)
        if gates is not None:
            return gates
        return row_local(call, facts) if grouped_order(facts.of(call["input"])) else None
    if not meta.same_shape(dims[1:], index[1:]):
        return None
    return _gather_rows(call, facts, call["input"], call["index"], expanded=True)


def _gather_rows(
    call: Call, facts: Facts, source: Node, index: Node, expanded: bool = False
) -> Fact | Miss | None:
    """Return what ``source[index]`` is, by the meaning of the index."""
    chosen = None if expanded else chosen_tokens(facts, source, index)
    if chosen is not None:
        return chosen
    fact = facts.of(index)
    if fact is None and not expanded and len(meta.shape(source)) == 3 and meta.is_integer(index):
        # Ids out of a table, say: a layer of gathered weights all the same, which is to be named.
        fact = facts.ids_without_bound(index)
    if isinstance(fact, Hit):
        return gather_hit(call, facts, source, fact)
    if isinstance(fact, ExpertIds) and fact.layout is not Layout.ROWS and not expanded:
        return _by_ids(call, source, fact)
    if not expanded and len(meta.shape(index)) != 1:
        return None
    if isinstance(fact, PlacesInMap):
        return gather_places(call, facts, source, fact)
    if isinstance(fact, TokenOfSlot):
        copies = _leads(index, meta.shape(source)[0] * fact.top_k)
        return Repeated(source, fact.top_k, call.node) if copies else None
    if isinstance(fact, Order) and fact.expert is not None:
        return gather_slots(call, facts, source, fact)
    if isinstance(fact, Order):
        return _by_order(call, facts, source, fact)
    if isinstance(fact, TokenOfRow):
        if not _leads(source, fact.root.tokens):
            return _wrong_length(call, fact, source, "the tokens", fact.root.tokens)
        return Rows(fact.root, fact.order, source, call.node, call.node)
    if isinstance(fact, Inverse):
        return _by_inverse(call, facts, source, fact)
    if isinstance(fact, ExpertIds) and fact.layout is Layout.ROWS and fact.order is not None:
        return PerExpert(fact.root, fact.order, source, call.node)
    return None


def _by_ids(call: Call, source: Node, fact: ExpertIds) -> Fact | None:
    """Return what ids by token or by slot select: a matrix or a vector per slot."""
    weights = gather_weights(call, fact, source)
    if weights is not None:
        return weights
    order = slot_order(fact.root)
    by_slot = len(meta.shape(source)) == 2 and order.row_dims(meta.shape(call.node)) > 0
    return PerExpert(fact.root, order, source, call.node) if by_slot else None


def _leads(source: Node, length: Any) -> bool:
    dims = meta.shape(source)
    return bool(dims) and meta.same_dim(dims[0], length)


def _by_order(call: Call, facts: Facts, source: Node, order: Order) -> Fact | Miss | None:
    """Return what a tensor in slot order becomes when the permutation of the sort indexes it."""
    fact, root = facts.of(source), order.root
    if not _leads(source, root.slots):
        return _wrong_length(call, order, source, "the slots", root.slots)
    if isinstance(fact, Arange):
        return order
    if isinstance(fact, ExpertIds):
        same = fact.root is root and fact.layout is Layout.SLOTS
        return ExpertIds(root, Layout.ROWS, order) if same else None
    if isinstance(fact, TokenOfSlot):
        return TokenOfRow(root, order) if fact.top_k == root.top_k else None
    if isinstance(fact, Repeated) and _is_one_per_slot(fact, order):
        return Rows(root, order, fact.source, call.node, fact.read_at)
    if grouped_order(fact) is not None:
        return Miss(
            "one-permutation",
            call.node,
            root,
            lambda: f"{source.name}, whose rows are already grouped",
            "a tensor in slot order",
        )
    return PerSlot(root, order, source, call.node)


def _is_one_per_slot(fact: Repeated, order: Order) -> bool:
    return fact.times == order.root.top_k and _leads(fact.source, order.root.tokens)


def _by_inverse(call: Call, facts: Facts, source: Node, inverse: Inverse) -> Fact | Miss | None:
    """Return what rows become when the inverse permutation indexes them."""
    body = as_row_wise(source, facts.of(source))
    if body is None:
        return None
    if not inverse.order.same(body.order):
        return Miss(
            "one-permutation",
            call.node,
            body.root,
            lambda: f"the inverse of another permutation ({inverse.order.maker.name})",
            lambda: f"the inverse of the sort that grouped the rows ({body.order.maker.name})",
        )
    return Unpermuted(body.root, contribution(call, source, facts.of(source), body))


def _wrong_length(
    call: Call, fact: Order | TokenOfRow, source: Node, what: str, length: Any
) -> Miss:
    return Miss(
        "row-count",
        call.node,
        fact.root,
        lambda: f"{source.name} of shape {list(meta.shape(source))}",
        lambda: f"a first dimension equal to {what}, {length}",
    )


@rule("index_put")
def _index_put(call: Call, facts: Facts) -> Fact | Miss | None:
    indices = call["indices"]
    if len(indices) != 1 or not meta.is_tensor(indices[0]):
        return None
    index = facts.of(indices[0])
    if isinstance(index, TokenOfRow) and call["accumulate"] is True:
        return add_by_token(call, facts, indices[0], call["values"])
    if call["accumulate"] is False and isinstance(index, Hit | Order | TokenOfRow):
        found = put_rows_of_expert(call, facts, index, call["values"])
        if found is not None:
            return found
    base = facts.of(call["input"])
    zeros = isinstance(base, Constant) and base.value == 0
    if call["accumulate"] is not False and not zeros:
        return None
    return _put_rows(call, facts, indices[0], call["values"])


@rule("index_copy")
def _index_copy(call: Call, facts: Facts) -> Fact | Miss | None:
    if meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) != 0:
        return None
    return _put_rows(call, facts, call["index"], call["source"])


@rule("scatter")
def _scatter(call: Call, facts: Facts) -> Fact | Miss | None:
    ids = facts.of(call["index"])
    if isinstance(ids, ExpertIds):
        return map_by_scatter(call, facts, ids)
    if meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) != 0:
        return None
    if not meta.is_tensor(call["src"]):
        return None
    same = meta.same_shape(meta.shape(call["index"]), meta.shape(call["src"]))
    return _put_rows(call, facts, call["index"], call["src"]) if same else None


def _put_rows(call: Call, facts: Facts, index: Node, values: Any) -> Fact | Miss | None:
    """Return what writing one value per row at the slot of the row makes of the whole tensor.

    The order is a permutation of all slots, so nothing of the old contents is left.
    """
    order = facts.of(index)
    if not isinstance(order, Order) or order.expert is not None or not meta.is_tensor(values):
        return None
    if not _leads(call["input"], order.root.slots):
        return _wrong_length(call, order, call["input"], "the slots", order.root.slots)
    if not meta.same_shape(meta.shape(call["input"])[1:], meta.shape(values)[1:]):
        return None
    fact = facts.of(values)
    if isinstance(fact, Arange):
        return Inverse(order.root, order)
    body = as_row_wise(values, fact)
    if body is None:
        return None
    if not order.same(body.order):
        return Miss(
            "one-permutation",
            call.node,
            body.root,
            lambda: f"rows put back by another permutation ({order.maker.name})",
            lambda: f"the sort that grouped the rows ({body.order.maker.name})",
        )
    return Unpermuted(body.root, contribution(call, values, fact, body))
