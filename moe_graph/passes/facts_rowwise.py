"""What is computed row by row: elementwise ops, ops within a row, and the products per expert.

A row-wise value keeps the order of its rows and mixes no two of them, so it may be computed on rows
in any grouped order. Every operand is either in the same order of rows, or the same for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Ends,
    ExpertIds,
    Fact,
    Grouped,
    Layout,
    Order,
    Part,
    PerExpert,
    PerSlot,
    Rows,
    RowWise,
)
from moe_graph.passes.misses import Miss
from moe_graph.passes.spellings import ELEMENTWISE


def grouped_order(fact: Fact | None) -> Order | None:
    """Return the order of the rows of a grouped value, None for any other fact."""
    if isinstance(fact, Grouped):
        return fact.order
    return fact.order if isinstance(fact, ExpertIds) and fact.layout is Layout.ROWS else None


def as_row_wise(node: Node, fact: Fact | None) -> RowWise | None:
    """Return a grouped value as a row-wise one, None for any other fact."""
    order = grouped_order(fact)
    if order is None or isinstance(fact, RowWise):
        return fact if isinstance(fact, RowWise) else None
    leaf = fact.leaf if isinstance(fact, Rows | Part | PerSlot | PerExpert) else node
    return RowWise(order.root, order, frozenset([leaf]), frozenset())


def merge(call: Call, facts: Facts, operands: Sequence[Node]) -> RowWise | Miss | None:
    """Return the row-wise value of `operands`, which must all be in one order or in none."""
    parts = [p for p in (as_row_wise(n, facts.of(n)) for n in operands) if p is not None]
    if not parts:
        return None
    order = parts[0].order
    for part in parts[1:]:
        if not order.same(part.order):
            return Miss(
                "one-permutation",
                call.node,
                order.root,
                lambda: "rows in two orders",
                "all operands in the order of one sort of the expert ids",
            )
    leaves = frozenset().union(*(part.leaves for part in parts))
    products = frozenset().union(*(part.products for part in parts))
    return RowWise(order.root, order, leaves, products)


def elementwise(call: Call, facts: Facts) -> Fact | Miss | None:
    """Return the row-wise value of an elementwise op."""
    operands = list(call.tensors())
    row_wise = merge(call, facts, operands)
    if not isinstance(row_wise, RowWise) or not meta.is_tensor(call.node):
        return row_wise if isinstance(row_wise, Miss) else None
    dims = meta.shape(call.node)
    leaves = row_wise.leaves
    for operand in operands:
        if _is_slot_value(facts, row_wise.order, operand, dims):
            facts.adopt(operand, PerSlot(row_wise.root, row_wise.order, operand, operand))
            leaves |= {operand}
        grouped = grouped_order(facts.of(operand)) is not None
        if not _fits_rows(row_wise.order, meta.shape(operand), dims, grouped):
            return _foreign_operand(call, row_wise, operand)
    return RowWise(row_wise.root, row_wise.order, leaves, row_wise.products)


def _fits_rows(
    order: Order, operand: tuple[Any, ...], result: tuple[Any, ...], grouped: bool
) -> bool:
    """Tell whether broadcasting pairs every row of the result with its own row of the operand."""
    leading = order.row_dims(result)
    if grouped:
        same = len(operand) == len(result) and _counts_rows(order, operand, leading)
        # Parts of experts have lengths that no symbol compares; one order is one length.
        lengths = isinstance(operand[0], int) and isinstance(result[0], int)
        return same and (not lengths or operand[0] == result[0])
    missing = len(result) - len(operand)
    counted = [operand[at - missing] for at in range(leading) if at >= missing]
    return leading > 0 and all(meta.same_dim(dim, 1) for dim in counted)


def _counts_rows(order: Order, dims: tuple[Any, ...], leading: int) -> bool:
    """Tell whether the `leading` first dimensions count the rows."""
    if order.row_dims(dims) == leading:
        return leading > 0
    # With one expert per token [T, 1] is one row per token, or one choice for each.
    return leading == 1 and not order.grouped and meta.same_dim(dims[0], order.root.slots)


def _is_slot_value(facts: Facts, order: Order, operand: Node, result: tuple[Any, ...]) -> bool:
    """Tell whether the shape of an operand alone says that it holds one value per slot."""
    if order.grouped or facts.of(operand) is not None:
        return False
    dims = meta.shape(operand)
    return len(dims) == len(result) and _counts_rows(order, dims, order.row_dims(result))


def _foreign_operand(call: Call, rows: RowWise, operand: Node) -> Miss:
    return Miss(
        "row-operand",
        call.node,
        rows.root,
        lambda: f"operand {operand.name} of shape {list(meta.shape(operand))}",
        "an operand in the order of the rows, or the same for all rows",
        "index it with the permutation of the sort",
    )


@rule(*sorted(ELEMENTWISE - {"div", "eq", "ge", "masked_fill", "mul", "where"}))
def _elementwise(call: Call, facts: Facts) -> Fact | Miss | None:
    return elementwise(call, facts)


@rule("dropout")
def _dropout(call: Call, facts: Facts) -> Fact | Miss | None:
    if call["training"] is False or call["p"] == 0:
        return row_local(call, facts)
    rows = as_row_wise(call["input"], facts.of(call["input"]))
    if rows is None:
        return None
    return Miss(
        "random-in-experts",
        call.node,
        rows.root,
        lambda: f"dropout(p={call['p']}) on the rows",
        "a body that computes the same whatever the order of the rows",
        "put the dropout after the combine, or set its p to 0",
    )


def row_local(call: Call, facts: Facts) -> Fact | Miss | None:
    """Return the row-wise value of an op that mixes elements of one row only."""
    source = call.get("input")
    row_wise = merge(call, facts, list(call.tensors()))
    if not isinstance(row_wise, RowWise):
        return row_wise
    if grouped_order(facts.of(source)) is None and call.op != "cat":
        return None
    others = [n for n in call.tensors() if n is not source]
    if call.op != "cat" and any(grouped_order(facts.of(n)) is not None for n in others):
        return None
    if not _within_rows(call, row_wise.order):
        return Miss(
            "row-wise",
            call.node,
            row_wise.root,
            lambda: f"{call.op} across rows",
            "an op that mixes elements of one row only",
        )
    return row_wise


def _within_rows(call: Call, order: Order) -> bool:
    """Tell whether an op leaves the dimensions alone that count the rows."""
    source = call.get("input") if call.op != "cat" else call["tensors"][0]
    rank, leading = len(meta.shape(source)), order.row_dims(meta.shape(source))
    if leading == 0:
        return False
    if call.op in ("layer_norm", "rms_norm"):
        normalised = call.get("1") or call.get("normalized_shape") or ()
        return len(normalised) <= rank - leading
    if call.op == "linear":
        return rank > leading
    if call.op == "matmul":
        return rank > leading and len(meta.shape(call["other"])) == 2
    if call.op == "slice":
        return _keeps_leading_dims(call["index"], rank, leading)
    if call.op == "dropout":
        return True
    dims = call.get("dim") if call.get("dim") is not None else call.get("1")
    dims = dims if isinstance(dims, tuple | list) else [dims]
    wrapped = [meta.wrap_dim(dim, rank) for dim in dims]
    return bool(wrapped) and all(dim is not None and dim >= leading for dim in wrapped)


def _keeps_leading_dims(index: tuple[Any, ...], rank: int, leading: int) -> bool:
    """Tell whether a basic subscript takes all of the first dimensions."""
    if index and index[0] is Ellipsis:
        return sum(item is not None for item in index[1:]) <= rank - leading
    return len(index) >= leading and all(item == slice(None) for item in index[:leading])


@rule(
    "amax",
    "amin",
    "chunk",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "mean",
    "narrow",
    "rms_norm",
    "softmax",
    "unbind",
    "var",
)
def _row_local(call: Call, facts: Facts) -> Fact | Miss | None:
    return row_local(call, facts)


@rule("grouped_mm")
def _grouped_mm(call: Call, facts: Facts) -> Fact | Miss | None:
    rows, weight = call["input"], call["weight"]
    body, ends = as_row_wise(rows, facts.of(rows)), facts.of(call["offs"])
    if body is None or len(meta.shape(weight)) != 3:
        return None
    if grouped_order(facts.of(weight)) is not None or call["bias"] is not None:
        return None
    experts = meta.shape(weight)[0]
    if not isinstance(ends, Ends):
        return Miss(
            "group-ends",
            call.node,
            body.root,
            lambda: f"offs = {call['offs']}, of unknown meaning",
            "the running sum of the rows per expert",
        )
    if ends.root is not body.root:
        return Miss(
            "one-root",
            call.node,
            body.root,
            lambda: f"counts of {ends.root.ids.name}, rows ordered by {body.root.ids.name}",
            "counts and rows from the same expert ids",
        )
    if ends.experts != experts:
        return Miss(
            "experts",
            call.node,
            body.root,
            lambda: f"counts of {ends.experts} experts, weights of {experts}",
            "as many counts as experts in the weight",
        )
    if meta.dtype(call.node) != meta.dtype(rows):
        return Miss(
            "product-dtype",
            call.node,
            body.root,
            lambda: f"{meta.dtype(rows)} rows, {meta.dtype(call.node)} product",
            "a product in the dtype of the rows",
        )
    return RowWise(body.root, body.order, body.leaves, body.products | {call.node})
