"""Ops that change shape, dtype or layout, and what stays true of their result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, outputs_of, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    AboutRoot,
    Arange,
    Axis,
    Choice,
    Combined,
    Constant,
    Counts,
    Ends,
    ExpertIds,
    Fact,
    Grouped,
    Hit,
    HitTable,
    Inverse,
    Layout,
    Masks,
    Order,
    Part,
    PerSlot,
    PlacesInMap,
    Repeated,
    Rows,
    RowsBehindOne,
    SortedMap,
    TokenOfRow,
    TokenOfSlot,
    Unpermuted,
    Weighted,
    WeightsOfSlots,
    slot_order,
)
from moe_graph.passes.facts_dense import tokens_for_experts
from moe_graph.passes.facts_loops import column_of_slice
from moe_graph.passes.facts_maps import first_places, flat_map
from moe_graph.passes.facts_masks import slice_or_row_local
from moe_graph.passes.facts_rowwise import as_row_wise, elementwise, row_local
from moe_graph.passes.facts_splits import entry_of_counts, join
from moe_graph.passes.misses import Miss

EXACT_FOR_SLOTS = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that are taken to hold every slot number and every count."""

_Vector = Order | Inverse | TokenOfRow | TokenOfSlot | Arange | PlacesInMap


@rule("result")
def _result(call: Call, facts: Facts) -> Fact | None:
    fact = facts.of(call["input"])
    part = outputs_of(fact, call["index"])
    if isinstance(part, Part):
        return replace(part, leaf=call.node)
    return fact if isinstance(fact, Grouped) else part


@rule("cast", "detach")
def _cast(call: Call, facts: Facts) -> Fact | Miss | None:
    fact, kind = facts.of(call["input"]), meta.dtype(call.node)
    if call.op == "detach" and kind.is_floating_point:
        return None
    if isinstance(fact, ExpertIds):
        return fact if holds_ids(kind, fact.root.bound) else _inexact(call, fact)
    if isinstance(fact, _Vector | Counts | Ends):
        if kind in EXACT_FOR_SLOTS:
            return fact
        return _inexact(call, fact) if isinstance(fact, AboutRoot) else None
    if isinstance(fact, PerSlot):
        # A weight may change its dtype on the way to the rows; whoever reads it looks at the dtype.
        return fact
    if isinstance(fact, Weighted) and kind.is_floating_point:
        # The combine sums in fp32 or in the dtype of the result, and rounds once after it.
        return fact
    if isinstance(fact, Grouped):
        return fact if meta.dtype(call["input"]) == kind else elementwise(call, facts)
    if isinstance(fact, Hit):
        return fact if kind is torch.bool or meta.dtype(call["input"]) is torch.bool else None
    return fact if isinstance(fact, Unpermuted | Constant | Masks | Repeated) else None


def holds_ids(kind: torch.dtype, bound: int | None) -> bool:
    """Tell whether `kind` represents every id below `bound` exactly."""
    if kind.is_floating_point:
        return kind in EXACT_FOR_SLOTS or (bound is not None and bound <= 2 / torch.finfo(kind).eps)
    if kind is torch.bool or kind.is_complex:
        return False
    return kind in EXACT_FOR_SLOTS or (bound is not None and bound - 1 <= torch.iinfo(kind).max)


def _inexact(call: Call, fact: AboutRoot) -> Miss:
    return Miss(
        "exact-dtype",
        call.node,
        fact.root,
        lambda: f"{type(fact).__name__} as {meta.dtype(call.node)}",
        "a dtype that holds every value exactly, such as int32",
    )


@rule("reshape")
def _reshape(call: Call, facts: Facts) -> Fact | None:
    if not meta.is_tensor(call["input"]):
        return None
    fact = facts.of(call["input"])
    old, new = meta.shape(call["input"]), meta.shape(call.node)
    if fact is None:
        return None
    if meta.same_shape(old, new):
        return fact
    if isinstance(fact, ExpertIds) and fact.layout is not Layout.ROWS:
        return _reshaped_ids(fact, new)
    if isinstance(fact, _Vector | ExpertIds):
        return fact if _is_column(old, new) else None
    if isinstance(fact, PerSlot):
        return fact if _is_column(old, new) else _same_rows(call, facts, old, new)
    if isinstance(fact, Grouped):
        return _same_rows(call, facts, old, new)
    if isinstance(fact, Unpermuted):
        return fact if slots_lead(fact, new) else None
    if isinstance(fact, Repeated):
        flat = len(old) == 3 and len(new) == 2 and meta.same_dim(new[1], old[2])
        flattens = flat and meta.same_dim(new[0], old[0] * old[1])
        return fact if flattens or _adds_ones(old, new) else None
    if isinstance(fact, WeightsOfSlots):
        rows = slot_order(fact.root).row_dims(new)
        return fact if rows and meta.same_shape(new[rows:], old[-2:]) else None
    if isinstance(fact, RowsBehindOne):
        gathered = Rows(fact.root, fact.order, fact.source, call.node, fact.read_at)
        return gathered if meta.same_shape(new, old[1:]) else None
    if isinstance(fact, Masks) and len(new) == 1:
        return flat_map(fact, new)
    if isinstance(fact, Masks):
        flat = fact.axes[-2:] == (Axis.CHOICE, Axis.EXPERT) and len(new) == 2
        by_slot = flat and meta.same_shape(new, (fact.root.slots, old[-1]))
        return Masks(fact.root, (Axis.SLOT, Axis.EXPERT)) if by_slot else None
    if isinstance(fact, Combined):
        token = len(old) == 3 and meta.same_shape(new, (old[0], old[2]))
        return fact if token and meta.same_dim(old[1], 1) else None
    return fact if isinstance(fact, Constant) else None


def _reshaped_ids(fact: ExpertIds, new: tuple[Any, ...]) -> ExpertIds | None:
    """Return ids by token or by slot in a new shape."""
    root = fact.root
    if len(new) > 1 and meta.same_dim(new[-1], root.top_k):
        return ExpertIds(root, Layout.TOKENS)
    if meta.same_dim(new[0], root.slots) and all(meta.same_dim(dim, 1) for dim in new[1:]):
        return ExpertIds(root, Layout.SLOTS)
    return None


def _is_column(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Tell whether a reshape only adds or drops trailing dimensions of length 1."""
    tails = [*old[1:], *new[1:]]
    return bool(new) and meta.same_dim(old[0], new[0]) and all(meta.same_dim(d, 1) for d in tails)


def _adds_ones(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Tell whether a reshape only adds or drops dimensions of length 1 behind the first."""
    wide = [[d for d in dims[1:] if not meta.same_dim(d, 1)] for dims in (old, new)]
    same = len(wide[0]) == len(wide[1]) and all(map(meta.same_dim, *wide))
    return bool(new) and meta.same_dim(old[0], new[0]) and same


def _same_rows(call: Call, facts: Facts, old: tuple[Any, ...], new: tuple[Any, ...]) -> Fact | None:
    body = as_row_wise(call["input"], facts.of(call["input"]))
    if body is not None and not body.order.grouped:
        return body if body.order.row_dims(new) else None
    keeps = bool(new) and meta.same_dim(old[0], new[0])
    return body if keeps else None


def slots_lead(fact: Unpermuted, dims: tuple[Any, ...]) -> bool:
    """Tell whether a shape is ``[T * K, H]`` or ``[..., K, H]``."""
    if len(dims) == 2:
        return meta.same_dim(dims[0], fact.root.slots)
    tokens = meta.product(dims[:-2])
    by_k = len(dims) > 2 and meta.same_dim(dims[-2], fact.root.top_k)
    return by_k and meta.same_dim(tokens, fact.root.tokens)


@rule("expand", "repeat")
def _expand(call: Call, facts: Facts) -> Fact | None:
    source = call["input"]
    fact, old, new = facts.of(source), meta.shape(source), meta.shape(call.node)
    if isinstance(fact, Constant):
        return fact
    if fact is None:
        return _repeated_by_expand(call, facts) or tokens_for_experts(call)
    if len(old) != len(new) or not meta.same_dim(old[0], new[0]):
        return None
    if isinstance(fact, Order | Inverse | TokenOfRow):
        return fact
    return as_row_wise(source, fact)


def _repeated_by_expand(call: Call, facts: Facts) -> Fact | None:
    """Read ``x.unsqueeze(1).expand(-1, K, -1)`` or ``.repeat(1, K, 1)``: rows once per slot."""
    source, new = call["input"], meta.shape(call.node)
    unsqueeze = facts.calls.get(source)
    if unsqueeze is None or unsqueeze.op != "reshape" or len(new) != 3:
        return None
    token, old = unsqueeze["input"], meta.shape(source)
    if len(old) != 3 or not meta.same_dim(old[1], 1) or not isinstance(new[1], int):
        return None
    same = meta.same_shape(meta.shape(token), (new[0], new[2]))
    return Repeated(token, new[1], call.node) if same else None


@rule("slice")
def _slice(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    if isinstance(fact, ExpertIds) and fact.layout is Layout.TOKENS and fact.root.distinct:
        old, new = meta.shape(call["input"]), meta.shape(call.node)
        fewer = meta.same_shape(old[:-1], new[:-1]) and isinstance(fact.root.bound, int)
        return Choice(fact.root.bound, distinct=True) if fewer and fact.root.bound else None
    if isinstance(fact, SortedMap):
        return first_places(call, fact)
    if isinstance(fact, Counts):
        return entry_of_counts(call, fact)
    if isinstance(fact, HitTable):
        return column_of_slice(fact, call["index"])
    return slice_or_row_local(call, facts)


@rule("cat")
def _cat(call: Call, facts: Facts) -> Fact | Miss | None:
    joined = join(call, facts)
    if joined is not None:
        return joined
    parts = [facts.of(part) for part in call["tensors"]]
    ids = [p for p in parts if isinstance(p, ExpertIds) and p.layout is Layout.TOKENS]
    if not parts or len(ids) != len(parts):
        return row_local(call, facts)
    rank = len(meta.shape(call.node))
    bounds = [part.root.bound for part in ids]
    if meta.wrap_dim(call["dim"], rank) != rank - 1 or not all(bounds):
        return None
    return Choice(max(bound for bound in bounds if bound), distinct=False)
