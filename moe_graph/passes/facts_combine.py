"""Back to one row per token: weights over slots and the sum over the experts of a token.

::

    (y * weights_by_row[:, None])[inverse].view(T, K, H).sum(1)
    (y[inverse].view(T, K, H) * weights[..., None]).sum(1)
    einsum("tk,tkh->th", weights, y[inverse].view(T, K, H))
    zeros.index_add(0, token_of_row, y * weights_by_row[:, None])
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Combined,
    Contribution,
    ExpertIds,
    Fact,
    Masks,
    PerSlot,
    RowWise,
    TokenOfRow,
    Unpermuted,
    Weighted,
)
from moe_graph.passes.facts_dense import products_of_tokens
from moe_graph.passes.facts_gathered import (
    einsum_product,
    is_row_wise_by_slot,
    matrix_product,
)
from moe_graph.passes.facts_loops import add_rows_of_expert, base_of_sum, product_of_expert
from moe_graph.passes.facts_masks import sum_of_masks
from moe_graph.passes.facts_routing import counts_by_scatter
from moe_graph.passes.facts_rowwise import as_row_wise, elementwise, row_local
from moe_graph.passes.misses import Miss


def contribution(call: Call, rows: Node, fact: Fact | None, body: RowWise) -> Contribution:
    """Return what `rows` contribute where `call` reads them; their weight is kept apart."""
    return fact.contribution if isinstance(fact, Weighted) else Contribution(body, rows, call.node)


@rule("mul")
def _mul(call: Call, facts: Facts) -> Fact | Miss | None:
    left, right = call["input"], call["other"]
    for values, weights in ((left, right), (right, left)):
        fact = facts.of(values)
        if isinstance(fact, Unpermuted):
            return _weight_slots(call, facts, fact, values, weights)
    row_wise = elementwise(call, facts)
    if not isinstance(row_wise, RowWise):
        return row_wise
    for rows, weights in ((left, right), (right, left)):
        body, weight = facts.of(rows), facts.of(weights)
        if not isinstance(weight, PerSlot) or not isinstance(body, RowWise):
            continue
        if not body.products or isinstance(body, Weighted) or call.writes is not None:
            continue
        if _one_per_row(weights, body):
            share = Contribution(
                body,
                rows,
                call.node,
                weight.source,
                weight.leaf,
                meta.dtype(weights),
                weight.by_expert,
            )
            return Weighted(
                row_wise.root, row_wise.order, row_wise.leaves, row_wise.products, share
            )
    return row_wise


def _one_per_row(node: Node, body: RowWise) -> bool:
    dims = meta.shape(node)
    return all(meta.same_dim(dim, 1) for dim in dims[body.order.row_dims(dims) :])


def _unpermuted(call: Call, facts: Facts, rows: Node) -> Unpermuted | None:
    """Return rows in slot order: put back there, or never taken from it."""
    fact = facts.of(rows)
    if isinstance(fact, RowWise) and is_row_wise_by_slot(fact):
        by_k = fact.order.row_dims(meta.shape(rows)) == 2 or fact.root.top_k == 1
        return Unpermuted(fact.root, contribution(call, rows, fact, fact)) if by_k else None
    return fact if isinstance(fact, Unpermuted) else None


def _weight_slots(
    call: Call, facts: Facts, fact: Unpermuted, values: Node, weights: Any
) -> Fact | Miss:
    """Return rows in slot order times one weight per slot."""
    wanted = (*meta.shape(values)[:-1], 1)
    if _are_weights(facts, fact, weights, wanted):
        return Unpermuted(fact.root, _weighted(fact, weights, call))
    return Miss(
        "combine-weights",
        call.node,
        fact.root,
        lambda: f"rows in slot order times {weights}",
        "at most one product, with one weight per slot in slot order",
    )


def _are_weights(facts: Facts, fact: Unpermuted, weights: Any, wanted: tuple[Any, ...]) -> bool:
    """Tell whether `weights` are the first weights of a contribution, in slot order."""
    if not meta.is_tensor(weights) or facts.of(weights) is not None:
        return False
    first = fact.contribution.weights is None
    return first and meta.same_shape(meta.shape(weights), wanted)


def _weighted(fact: Unpermuted, weights: Node, call: Call) -> Contribution:
    return replace(
        fact.contribution,
        weights=weights,
        weights_at=call.node,
        weight_dtype=meta.dtype(weights),
    )


@rule("sum")
def _sum(call: Call, facts: Facts) -> Fact | Miss | None:
    fact, source = facts.of(call["input"]), call["input"]
    if isinstance(fact, Masks):
        return sum_of_masks(call, facts, fact)
    rank = len(meta.shape(source))
    dims = call["dim"] if isinstance(call["dim"], tuple | list) else [call["dim"]]
    over_k = rank > 2 and [meta.wrap_dim(dim, rank) for dim in dims] == [rank - 2]
    if is_row_wise_by_slot(fact):
        fact = _unpermuted(call, facts, source) if over_k and rank == 3 else None
    if not isinstance(fact, Unpermuted):
        return row_local(call, facts)
    if not over_k or call["keepdim"]:
        return Miss(
            "combine-sum",
            call.node,
            fact.root,
            lambda: f"sum over dim {call['dim']} of {list(meta.shape(source))}",
            "a sum over the experts of each token",
        )
    return Combined(fact.root, fact.contribution)


@rule("bmm", "matmul")
def _matmul(call: Call, facts: Facts) -> Fact | Miss | None:
    weights = call["input"]
    rows = call["mat2"] if call.op == "bmm" else call["other"]
    product = matrix_product(call, facts, weights, rows)
    if product is not None:
        return product
    fact = _unpermuted(call, facts, rows)
    if fact is not None:
        dims = meta.shape(rows)
        wanted = (dims[0], 1, dims[1]) if len(dims) == 3 else ()
        return _weighted_sum(call, facts, fact, weights, wanted)
    found = row_local(call, facts) if call.op == "matmul" else None
    return product_of_expert(call, facts, found)


@rule("linear")
def _linear(call: Call, facts: Facts) -> Fact | Miss | None:
    return product_of_expert(call, facts, row_local(call, facts))


@rule("einsum")
def _einsum(call: Call, facts: Facts) -> Fact | Miss | None:
    operands = call["operands"]
    left, _, result = str(call["equation"]).replace(" ", "").partition("->")
    terms = left.split(",")
    if len(operands) != 2 or len(terms) != 2:
        return None
    product = einsum_product(call, facts, terms, operands, result)
    product = product or products_of_tokens(call, facts, terms, result)
    if product is not None:
        return product
    for rows, weights in ((0, 1), (1, 0)):
        fact = _unpermuted(call, facts, operands[rows])
        if fact is None:
            continue
        term = terms[rows]
        weighted = len(term) == 3 and terms[weights] == term[:2] and result == term[0] + term[2]
        dims = meta.shape(operands[rows])
        wanted = dims[:2] if weighted else ()
        return _weighted_sum(call, facts, fact, operands[weights], wanted)
    return None


def _weighted_sum(
    call: Call, facts: Facts, fact: Unpermuted, weights: Node, wanted: tuple[Any, ...]
) -> Fact | Miss:
    """Return the combine that one matrix product per token makes."""
    if wanted and _are_weights(facts, fact, weights, wanted):
        return Combined(fact.root, _weighted(fact, weights, call))
    return Miss(
        "combine-weights",
        call.node,
        fact.root,
        lambda: f"{call.op} of rows in slot order with {weights}",
        "one weight per slot, summed over the experts of each token",
    )


@rule("index_add")
def _index_add(call: Call, facts: Facts) -> Fact | Miss | None:
    if meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) != 0 or call["alpha"] != 1:
        return None
    return add_by_token(call, facts, call["index"], call["source"])


@rule("scatter_reduce")
def _scatter_reduce(call: Call, facts: Facts) -> Fact | Miss | None:
    sums = call["reduce"] == "sum" and call["include_self"] is True
    return _scatter_add(call, facts) if sums else None


@rule("scatter_add")
def _scatter_add(call: Call, facts: Facts) -> Fact | Miss | None:
    if meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) != 0:
        return None
    ids = facts.of(call["index"])
    if isinstance(ids, ExpertIds):
        return counts_by_scatter(call, facts, ids)
    # The rows of one order are as many, whatever symbols count them.
    same = meta.same_shape(meta.shape(call["index"])[1:], meta.shape(call["src"])[1:])
    return add_by_token(call, facts, call["index"], call["src"]) if same else None


def add_by_token(call: Call, facts: Facts, index: Node, values: Any) -> Fact | Miss | None:
    """Return the combine that adding every row to the row of its token makes."""
    token, fact = facts.of(index), facts.of(values)
    if isinstance(token, TokenOfRow) and token.order.expert is not None:
        return add_rows_of_expert(call, facts, token, values)
    body = as_row_wise(values, fact) if isinstance(values, Node) else None
    if not isinstance(token, TokenOfRow) or body is None:
        return None
    if not token.order.same(body.order):
        return Miss(
            "one-permutation",
            call.node,
            body.root,
            lambda: f"tokens of the rows of another sort ({token.order.maker.name})",
            lambda: f"the sort that grouped the rows ({body.order.maker.name})",
        )
    dims = meta.shape(call["input"])
    if not meta.same_shape(dims, (body.root.tokens, *meta.shape(values)[1:])):
        return None
    base = base_of_sum(call, facts, body.root)
    if isinstance(base, Miss):
        return base
    return Combined(body.root, contribution(call, values, fact, body), base)
