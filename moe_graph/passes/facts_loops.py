"""Loops over experts: the rows of one expert at a time, and what each adds to the result.

::

    token, k = torch.where(ids == e)                TokenOfRow, ChoiceOfRow of expert e
    x[token], x[(ids == e).any(-1)]                 Rows of expert e
    weights[token, k, None], weights[ids == e]      PerSlot of expert e
    y.index_add_(0, token, rows * weights)          Gathering, and Combined after the last expert
    y[token] += rows * weights                      the same
    y[flat_ids == e] = rows                         Gathering, and Unpermuted after the last expert

The rows of one expert are an :class:`~moe_graph.passes.facts.Order` of their own.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Axis,
    ChoiceOfRow,
    Combined,
    Constant,
    Contribution,
    Fact,
    Gathering,
    Hit,
    HitTable,
    Order,
    Outputs,
    PerSlot,
    Repeated,
    Root,
    Rows,
    RowsBehindOne,
    RowWise,
    TokenOfRow,
    TokenOfSlot,
    Unpermuted,
    Unrolled,
    Weighted,
)
from moe_graph.passes.facts_maps import values_of
from moe_graph.passes.facts_rowwise import as_row_wise, elementwise
from moe_graph.passes.misses import Miss

_FLAT = ((Axis.SLOT,), (Axis.TOKEN, Axis.CHOICE))


def order_of(hit: Hit, maker: Node) -> Order | None:
    """Return the order in which the rows of one expert come out of a mask."""
    by_token = hit.axes in _FLAT or (hit.axes == (Axis.TOKEN,) and hit.root.distinct)
    if not by_token and hit.axes != (Axis.CHOICE, Axis.TOKEN):
        return None
    # Two searches of masks with the same axes find the same places in the same order.
    return Order(hit.root, maker, stable=by_token, expert=hit.expert)


@rule("nonzero")
def _nonzero(call: Call, facts: Facts) -> Fact | None:
    return _found(call, facts.of(call["input"]), as_tuple=call["as_tuple"] is True)


@rule("where")
def _where(call: Call, facts: Facts) -> Fact | Miss | None:
    if call.get("input") is None:
        return _found(call, facts.of(call["condition"]), as_tuple=True)
    return elementwise(call, facts)


def _found(call: Call, fact: Fact | None, *, as_tuple: bool) -> Fact | None:
    order = order_of(fact, call.node) if isinstance(fact, Hit) else None
    if order is None or not isinstance(fact, Hit):
        return None
    table = HitTable(fact.root, order, fact.axes)
    columns = tuple(column_of(table, at) for at in range(len(fact.axes)))
    return Outputs(columns) if as_tuple else table


def column_of(table: HitTable, column: int) -> Fact | None:
    """Return what one column of the indices of a mask is."""
    axis = table.axes[column]
    if axis is Axis.SLOT:
        return table.order
    if axis is Axis.TOKEN:
        return TokenOfRow(table.root, table.order)
    return ChoiceOfRow(table.root, table.order) if axis is Axis.CHOICE else None


def column_of_slice(table: HitTable, index: tuple[Any, ...]) -> Fact | None:
    """Return what a basic subscript of a table of indices is."""
    column = index[-1] if len(index) == 2 and index[0] in (slice(None), Ellipsis) else None
    return column_of(table, column) if isinstance(column, int) else None


def gather_hit(call: Call, facts: Facts, source: Node, hit: Hit) -> Fact | None:
    """Return what ``source[mask]`` is for the mask of one expert."""
    order, dims, root = order_of(hit, call.node), meta.shape(source), hit.root
    if order is None:
        return None
    fact = facts.of(source)
    if hit.axes == (Axis.TOKEN,):
        fits = meta.same_dim(dims[0], root.tokens) and len(dims) == 2
        return Rows(root, order, source, call.node, call.node) if fits else None
    if hit.axes == (Axis.SLOT,):
        return gather_slots(call, facts, source, order)
    by_token = hit.axes == (Axis.TOKEN, Axis.CHOICE) and fact is None
    fits = by_token and meta.same_shape(dims[:2], (root.tokens, root.top_k))
    return PerSlot(root, order, source, call.node) if fits else None


def gather_slots(call: Call, facts: Facts, source: Node, order: Order) -> Fact | None:
    """Return what the slots of one expert read from a tensor in slot order."""
    fact, root = facts.of(source), order.root
    dims = meta.shape(source)
    if not dims or not meta.same_dim(dims[0], root.slots):
        return None
    if isinstance(fact, Repeated):
        one_each = fact.times == root.top_k
        tokens = meta.same_dim(meta.shape(fact.source)[0], root.tokens)
        rows = Rows(root, order, fact.source, call.node, fact.read_at)
        return rows if one_each and tokens else None
    if isinstance(fact, TokenOfSlot):
        return TokenOfRow(root, order) if fact.top_k == root.top_k else None
    return PerSlot(root, order, source, call.node) if fact is None else None


@rule("mixed_index")
def _mixed_index(call: Call, facts: Facts) -> Fact | None:
    """Read ``weights[token, k, None]`` and ``x[None, token]``."""
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    tensors = [item for item in index if meta.is_tensor(item)]
    rest = [item for item in index if not meta.is_tensor(item)]
    if len(index) == 2 and index[0] is None and meta.is_tensor(index[1]):
        return _gather_behind_one(call, facts, index[1])
    first = all(map(meta.is_tensor, index[: len(tensors)]))
    # Dimensions of length 1 behind the gathered value make no difference.
    behind = all(item is None or item is Ellipsis for item in index[2:])
    if len(index) > 1 and len(tensors) == 1 and isinstance(index[1], int) and behind:
        return _gather_column(call, facts, call["input"], index[0], index[1])
    if not first or any(item is not None and item not in (Ellipsis, slice(None)) for item in rest):
        return None
    slots = facts.of(tensors[0])
    if len(tensors) == 1 and isinstance(slots, Order) and slots.expert is not None:
        return gather_slots(call, facts, call["input"], slots)
    return gather_pair(call, facts, call["input"], tensors)


def _gather_column(
    call: Call, facts: Facts, source: Node, index: Any, expert: int
) -> PerSlot | None:
    """Return what ``p[token, e]`` or ``p[mask, e]`` is, for the rows of expert ``e``."""
    fact = facts.of(index)
    order = fact.order if isinstance(fact, TokenOfRow) else None
    if isinstance(fact, Hit) and fact.axes == (Axis.TOKEN,):
        order = order_of(fact, call.node)
    own = order is not None and order.expert == expert and not isinstance(expert, bool)
    return values_of(call, facts, source, order) if own and order is not None else None


def _gather_behind_one(call: Call, facts: Facts, index: Node) -> Fact | None:
    token = facts.of(index)
    if not isinstance(token, TokenOfRow) or token.order.expert is None:
        return None
    source = call["input"]
    fits = meta.same_dim(meta.shape(source)[0], token.root.tokens) and len(meta.shape(index)) == 1
    return RowsBehindOne(token.root, token.order, source, call.node) if fits else None


def gather_pair(call: Call, facts: Facts, source: Node, indices: list[Node]) -> Fact | None:
    """Return what ``source[token, k]`` is: one value per slot."""
    if len(indices) != 2 or facts.of(source) is not None:
        return None
    token, choice = (facts.of(index) for index in indices)
    if not isinstance(token, TokenOfRow) or not isinstance(choice, ChoiceOfRow):
        return None
    root, dims = token.root, meta.shape(source)
    fits = token.order.same(choice.order) and meta.same_shape(dims[:2], (root.tokens, root.top_k))
    return PerSlot(root, token.order, source, call.node) if fits else None


def add_rows_of_expert(
    call: Call, facts: Facts, token: TokenOfRow, values: Node
) -> Fact | Miss | None:
    """Return what adding the rows of one expert to their tokens makes of a sum."""
    share = _share(call, facts, values, token.order)
    if share is None:
        return None
    base, root = facts.of(call["input"]), token.root
    if not meta.same_shape(meta.shape(call["input"]), (root.tokens, *meta.shape(values)[1:])):
        return None
    return _gather(call, facts, base, share, by_slot=False)


def put_rows_of_expert(
    call: Call, facts: Facts, index: Fact | None, values: Any
) -> Fact | Miss | None:
    """Return what writing the rows of one expert makes of a tensor.

    ``y[slots] = rows`` fills slots; ``y[token] = y[token] + rows`` adds to tokens, of which each
    has the expert once.
    """
    if not meta.is_tensor(values):
        return None
    if isinstance(index, Hit) and index.axes == (Axis.TOKEN,):
        hit = order_of(index, call.node)
        index = TokenOfRow(index.root, hit) if hit is not None else None
    if isinstance(index, TokenOfRow) and index.order.expert is not None and index.root.distinct:
        added = _added_to(call, facts, values, index.order)
        return add_rows_of_expert(call, facts, index, added) if added is not None else None
    order = index if isinstance(index, Order) else None
    if isinstance(index, Hit) and index.axes == (Axis.SLOT,):
        order = order_of(index, call.node)
    if order is None or order.expert is None:
        return None
    share = _share(call, facts, values, order)
    base, dims = facts.of(call["input"]), meta.shape(call["input"])
    fits = meta.same_shape(dims, (order.root.slots, *meta.shape(values)[1:]))
    return _gather(call, facts, base, share, by_slot=True) if share is not None and fits else None


def _added_to(call: Call, facts: Facts, values: Node, order: Order) -> Node | None:
    """Return `rows` if `values` are ``y[token] + rows`` for the tensor `y` that is written."""
    add, base = facts.calls[values], call["input"]
    if add.op != "add" or add["alpha"] != 1:
        return None
    for old, rows in ((add["input"], add["other"]), (add["other"], add["input"])):
        fact = facts.given.get(old) if isinstance(old, Node) else None
        if not isinstance(fact, Rows) or fact.source is not base or not fact.order.same(order):
            continue
        span = facts.position[fact.read_at], facts.position[call.node]
        if facts.memory.written_between(base, *span) is None and meta.is_tensor(rows):
            return rows
    return None


def _share(call: Call, facts: Facts, values: Node, order: Order) -> Contribution | None:
    fact = facts.of(values)
    body = as_row_wise(values, fact)
    if body is None or not body.order.same(order):
        return None
    if isinstance(fact, Weighted):
        return fact.contribution
    return Contribution(body, values, call.node)


def _gather(
    call: Call, facts: Facts, base: Fact | None, share: Contribution, *, by_slot: bool
) -> Fact | Miss | None:
    root, expert = share.body.root, share.body.order.expert
    assert expert is not None
    shares = {expert: share}
    onto: Node | Miss | None = None
    if isinstance(base, Gathering) and base.root is root and base.by_slot == by_slot:
        if expert in base.shares:
            got, want = f"expert {expert} a second time", "each expert once"
            return Miss("combine-base", call.node, root, got, want)
        shares, onto = {**base.shares, **shares}, base.base
    elif not by_slot:
        onto = base_of_sum(call, facts, root)
    elif not isinstance(base, Constant):
        return None
    if isinstance(onto, Miss):
        return onto
    if root.bound is None or set(shares) != set(range(root.bound)):
        return Gathering(root, shares, by_slot, onto)
    unrolled = _unrolled(tuple(shares[index] for index in range(root.bound)))
    return Unpermuted(root, unrolled) if by_slot else Combined(root, unrolled, onto)


def base_of_sum(call: Call, facts: Facts, root: Root) -> Node | Miss | None:
    """Return the tensor that rows are added onto, None for zeros."""
    onto: Node = call["input"]
    fact = facts.of(onto)
    if isinstance(fact, Constant) and fact.value == 0:
        return None
    if fact is None or (isinstance(fact, Combined) and fact.root is not root):
        return onto
    return Miss(
        "combine-base",
        call.node,
        root,
        lambda: f"rows added onto {onto.name} ({type(fact).__name__})",
        "rows added onto zeros, or onto a tensor apart from the layer",
        "add the other term afterwards",
    )


def _unrolled(shares: tuple[Contribution, ...]) -> Unrolled:
    """Return the contribution of all experts; weights that all of them share multiply it."""
    first = shares[0]
    weighted = {(s.weights, s.weight_dtype, s.weights_by_expert) for s in shares}
    if len(weighted) > 1:
        return Unrolled(first.body, first.rows, first.rows_at, shares=shares)
    return Unrolled(
        first.body,
        first.rows,
        first.rows_at,
        first.weights,
        first.weights_at,
        first.weight_dtype,
        first.weights_by_expert,
        shares,
    )


def product_of_expert(call: Call, facts: Facts, found: Fact | Miss | None) -> Fact | Miss | None:
    """Count a matrix product on the rows of one expert among the products of the layer."""
    if not isinstance(found, RowWise) or found.order.expert is None:
        return found
    return RowWise(found.root, found.order, found.leaves, found.products | {call.node})
