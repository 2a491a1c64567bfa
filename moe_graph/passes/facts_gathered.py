"""Products with the weights of every slot, gathered: the experts of a layer without any sort.

::

    bmm(w[ids.view(-1)], x.repeat_interleave(K, 0).unsqueeze(-1))     [T * K, N, 1]
    bmm(x.repeat_interleave(K, 0).unsqueeze(1), w[ids.view(-1)])      [T * K, 1, N]
    einsum("th,tknh->tkn", x, w[ids])                                 [T, K, N]

Each is a :class:`~moe_graph.passes.facts.SlotProduct`: its rows stand in the order of the slots,
and may as well be computed in the order of the experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    ExpertIds,
    Fact,
    Layout,
    Repeated,
    RowWise,
    SlotProduct,
    WeightsOfSlots,
    slot_order,
)
from moe_graph.passes.facts_rowwise import as_row_wise
from moe_graph.passes.misses import Miss


class _Operands(NamedTuple):
    """One product: `rows` times the matrices of `weights`, or times these swapped."""

    rows: Node
    weights: Node
    swapped: bool


def gather_weights(call: Call, fact: ExpertIds, table: Node) -> WeightsOfSlots | None:
    """Return what ``table[ids]`` is for ids by slot or by token and weights ``[E, ., .]``."""
    if fact.layout is Layout.ROWS or len(meta.shape(table)) != 3:
        return None
    return WeightsOfSlots(fact.root, table, call.node)


def matrix_product(call: Call, facts: Facts, left: Node, right: Node) -> Fact | Miss | None:
    """Return the value of ``left @ right`` where one of them holds gathered weights."""
    if isinstance(facts.of(left), WeightsOfSlots):
        if not meta.same_dim(meta.shape(right)[-1], 1):
            return _miss(call, facts, left)
        return _product(call, facts, _Operands(right, left, swapped=True))
    if isinstance(facts.of(right), WeightsOfSlots):
        dims = meta.shape(left)
        if len(dims) < 2 or not meta.same_dim(dims[-2], 1):
            return _miss(call, facts, right)
        return _product(call, facts, _Operands(left, right, swapped=False))
    return None


def einsum_product(
    call: Call, facts: Facts, terms: list[str], operands: list[Node], result: str
) -> Fact | Miss | None:
    """Return the value of an einsum of two operands of which one holds gathered weights."""
    for weights, rows in ((0, 1), (1, 0)):
        if not isinstance(facts.of(operands[weights]), WeightsOfSlots):
            continue
        prefix, matrix = terms[weights][:-2], terms[weights][-2:]
        vector = terms[rows][-1:]
        other = matrix.replace(vector, "")
        leading = terms[rows][:-1] in (prefix, prefix[:1])
        if not leading or len(other) != 1 or result != prefix + other:
            return _miss(call, facts, operands[weights])
        swapped = matrix[1] == vector
        return _product(call, facts, _Operands(operands[rows], operands[weights], swapped))
    return None


def _product(call: Call, facts: Facts, operands: _Operands) -> Fact | Miss:
    fact = facts.of(operands.weights)
    assert isinstance(fact, WeightsOfSlots)
    order = slot_order(fact.root)
    transposed = operands.swapped != fact.transposed
    if meta.dtype(call.node) != meta.dtype(operands.rows) or order.row_dims(_dims(call)) == 0:
        return _miss(call, facts, operands.weights)
    body = as_row_wise(operands.rows, facts.of(operands.rows))
    if body is not None:
        if not order.same(body.order) or not _is_one_vector(order.row_dims, operands.rows):
            return _miss(call, facts, operands.weights)
        products = body.products | {call.node}
        return SlotProduct(
            fact.root, body.order, body.leaves, products, fact, operands.rows, transposed
        )
    source = _tokens(facts, operands.rows, fact.root.top_k, call.node)
    if source is None or not meta.same_dim(meta.shape(source[0])[0], fact.root.tokens):
        return _miss(call, facts, operands.weights)
    own = frozenset([call.node])
    return SlotProduct(fact.root, order, own, own, fact, operands.rows, transposed, *source)


def _dims(call: Call) -> tuple[Any, ...]:
    return meta.shape(call.node)


def _is_one_vector(row_dims: Any, rows: Node) -> bool:
    """Tell whether every row of an operand is one vector, whatever dimensions of 1 it has."""
    dims = meta.shape(rows)
    leading = row_dims(dims)
    return leading > 0 and sum(not meta.same_dim(dim, 1) for dim in dims[leading:]) <= 1


def _tokens(facts: Facts, rows: Node, top_k: int, reader: Node) -> tuple[Node, Node] | None:
    """Return the tokens ``[T, H]`` that the rows of all slots are copies of, and who reads them."""
    fact = facts.of(rows)
    if isinstance(fact, Repeated):
        return (fact.source, fact.read_at) if fact.times == top_k else None
    node = rows
    while facts.calls[node].op == "reshape" and facts.calls[node].writes is None:
        node = facts.calls[node]["input"]
        if len(meta.shape(node)) == 2:
            break
    dims = meta.shape(rows)
    flat = len(meta.shape(node)) == 2
    wide = [dim for dim in dims[1:] if not meta.same_dim(dim, 1)]
    if not flat or len(wide) > 1 or facts.of(node) is not None:
        return None
    one_slot = top_k == 1 or len(dims) == 2 or (len(dims) == 4 and meta.same_dim(dims[1], 1))
    return (node, reader) if one_slot else None


def _miss(call: Call, facts: Facts, weights: Node) -> Miss:
    fact = facts.of(weights)
    assert isinstance(fact, WeightsOfSlots)
    return Miss(
        "form",
        call.node,
        fact.root,
        f"a product with weights gathered per slot ({weights.name})",
        "the row of each slot times the matrix of its expert, in the dtype of the rows",
        'with transformers, set experts_implementation="grouped_mm"',
    )


def is_row_wise_by_slot(fact: Fact | None) -> bool:
    """Tell whether a value is computed per slot and holds products of the slots' experts."""
    return isinstance(fact, RowWise) and not fact.order.grouped and bool(fact.products)
