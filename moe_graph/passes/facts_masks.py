"""One-hot tensors of the ids, by what each of their dimensions counts.

::

    one_hot(ids, E)                        Masks (T, K, E)
    one_hot(ids, E).permute(2, 1, 0)       Masks (E, K, T)
    zeros(T, E).scatter(1, ids, 1)         Masks (T, E)
    masks[e], ids == e                     Hit (K, T), Hit (T, K)
    masks.sum of all dims but E            Counts
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, integer_literal, rule
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    Axis,
    Choice,
    Constant,
    Counts,
    ExpertIds,
    Fact,
    Hit,
    Layout,
    Masks,
    ScatteredWeights,
    WeightsOfSlots,
)
from moe_graph.passes.facts_rowwise import elementwise, row_local
from moe_graph.passes.misses import Miss
from moe_graph.passes.products import swaps_last_dims
from moe_graph.passes.side_facts import SparseLogits


def _axes_of_ids(fact: ExpertIds, rank: int) -> tuple[Axis, ...]:
    """Return what the dimensions of ids count."""
    if fact.layout is Layout.TOKENS:
        return (*[Axis.TOKEN] * (rank - 1), Axis.CHOICE)
    first = Axis.SLOT if fact.layout is Layout.SLOTS else Axis.ROW
    return (first, *[Axis.ONE] * (rank - 1))


@rule("one_hot")
def _one_hot(call: Call, facts: Facts) -> Fact | None:
    fact = facts.of(call["input"])
    if not isinstance(fact, ExpertIds):
        return None
    axes = _axes_of_ids(fact, len(meta.shape(call["input"])))
    return Masks(fact.root, (*axes, Axis.EXPERT))


@rule("eq")
def _eq(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    expert = integer_literal(call.literal("other"))
    if isinstance(fact, ExpertIds) and expert is not None:
        return Hit(fact.root, expert, _axes_of_ids(fact, len(meta.shape(call["input"]))))
    return elementwise(call, facts)


@rule("masked_fill")
def _masked_fill(call: Call, facts: Facts) -> Fact | Miss | None:
    """Read ids whose last choice, which stands for no expert, gives way to another one."""
    fact, mask = facts.of(call["input"]), facts.of(call["mask"])
    if not isinstance(fact, ExpertIds):
        return elementwise(call, facts)
    root, other = fact.root, integer_literal(call.literal("value"))
    if not isinstance(mask, Hit) or mask.root is not root or fact.layout is not Layout.TOKENS:
        return None
    if root.bound is None or mask.expert != root.bound - 1 or other is None:
        return None
    return Choice(root.bound - 1, distinct=False) if 0 <= other < root.bound - 1 else None


@rule("any")
def _any(call: Call, facts: Facts) -> Fact | Miss | None:
    fact = facts.of(call["input"])
    axes = _over_choices(call, fact)
    return replace(fact, axes=axes) if axes else None  # type: ignore[type-var]


def _over_choices(call: Call, fact: Fact | None) -> tuple[Axis, ...] | None:
    """Return the axes that are left of a mask when a call reduces its choices, and only these."""
    if not isinstance(fact, Hit | Masks):
        return None
    given = call["dim"] if isinstance(call["dim"], tuple | list) else [call["dim"]]
    over = {meta.wrap_dim(dim, len(fact.axes)) for dim in given}
    left = tuple(axis for at, axis in enumerate(fact.axes) if at not in over)
    choices = [fact.axes[at] for at in over if at is not None] == [Axis.CHOICE]
    return left if choices and None not in over and not call.get("keepdim") else None


def sum_of_masks(call: Call, facts: Facts, fact: Masks) -> Fact | None:
    """Return what a sum over dimensions of a one-hot tensor is."""
    dims = meta.shape(call["input"])
    given = call["dim"] if isinstance(call["dim"], tuple | list) else [call["dim"]]
    over = {meta.wrap_dim(dim, len(dims)) for dim in given}
    experts = fact.axes.index(Axis.EXPERT)
    if over == set(range(len(dims))) - {experts} and not call["keepdim"]:
        count = dims[experts]
        return Counts(fact.root, count) if isinstance(count, int) else None
    left = _over_choices(call, fact)
    return Masks(fact.root, left) if left and fact.root.distinct else None


def map_by_scatter(call: Call, facts: Facts, ids: ExpertIds) -> Fact | None:
    """Return what writing ones, or weights, at the experts of each token makes of zeros."""
    base, source = facts.of(call["input"]), call["src"]
    fact = facts.of(source)
    one = fact.value if isinstance(fact, Constant) else source
    zeros = isinstance(base, Constant) and base.value == 0
    rank = len(meta.shape(call["input"]))
    last = meta.wrap_dim(call["dim"], rank) == rank - 1
    if isinstance(base, Constant) and base.value == -math.inf and last and fact is None:
        by_token = rank == 2 and ids.layout is Layout.TOKENS and meta.is_tensor(source)
        same = by_token and meta.same_shape(meta.shape(source), meta.shape(call["index"]))
        return SparseLogits(ids.root) if same else None
    if not (zeros and last and ids.layout is Layout.TOKENS and ids.root.distinct):
        return None
    axes = (*[Axis.TOKEN] * (rank - 1), Axis.EXPERT)
    if isinstance(one, Node):
        shape = (*meta.shape(call["input"])[:-1], ids.root.top_k)
        weights = fact is None and rank == 2 and meta.same_shape(meta.shape(one), shape)
        return ScatteredWeights(ids.root, one) if weights else None
    return Masks(ids.root, axes) if one in (1, 1.0, True) else None


@rule("permute")
def _permute(call: Call, facts: Facts) -> Fact | None:
    fact = facts.of(call["input"])
    if isinstance(fact, WeightsOfSlots):
        return replace(fact, transposed=not fact.transposed) if swaps_last_dims(call) else None
    if not isinstance(fact, Masks):
        return None
    order = _permutation(call, len(fact.axes))
    return Masks(fact.root, tuple(fact.axes[at] for at in order)) if order else None


def _permutation(call: Call, rank: int) -> list[int] | None:
    """Return which dimension of the source each dimension of a permuted tensor is."""
    example = meta.example(call["input"])
    if not hasattr(example, "new_empty"):
        return None
    # The strides of a dense tensor tell its dimensions apart, whatever the spelling.
    probe = example.new_empty([at + 2 for at in range(rank)], device="meta")
    spelled = _replay(call, probe)
    if spelled is None:
        return None
    strides = list(probe.stride())
    return [strides.index(stride) for stride in spelled.stride()]


def _replay(call: Call, probe: Any) -> Any:
    """Return what the node makes of another tensor of the same rank."""
    node = call.node
    args = [meta.example(arg) for arg in node.args[1:]]
    if node.op == "call_method":
        return getattr(probe, str(node.target))(*args, **node.kwargs)
    if node.target is getattr:
        return getattr(probe, str(node.args[1]))
    return node.target(probe, *args, **node.kwargs)  # type: ignore[operator]


@rule("select")
def _select(call: Call, facts: Facts) -> Fact | None:
    fact, expert = facts.of(call["input"]), integer_literal(call.literal("index"))
    dim = meta.wrap_dim(call["dim"], len(meta.shape(call["input"])))
    return hit_of_masks(fact, dim, expert)


def hit_of_masks(fact: Fact | None, dim: int | None, expert: object) -> Hit | None:
    """Return the mask of one expert out of a one-hot tensor."""
    literal = isinstance(expert, int) and not isinstance(expert, bool)
    if not literal or not isinstance(fact, Masks) or dim is None or expert < 0:  # type: ignore[operator]
        return None
    if fact.axes[dim] is not Axis.EXPERT:
        return None
    axes = fact.axes[:dim] + fact.axes[dim + 1 :]
    return Hit(fact.root, expert, axes)  # type: ignore[arg-type]


def slice_of_masks(call: Call, fact: Masks) -> Fact | None:
    """Return what a basic subscript of a one-hot tensor is: the mask of one expert."""
    index = call["index"]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        fill = len(fact.axes) - (len(index) - 1)
        index = (*index[:at], *[slice(None)] * fill, *index[at + 1 :])
    chosen = [at for at, item in enumerate(index) if item != slice(None)]
    return hit_of_masks(fact, chosen[0], index[chosen[0]]) if len(chosen) == 1 else None


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


def slice_or_row_local(call: Call, facts: Facts) -> Fact | Miss | None:
    """Return what a basic subscript is."""
    fact = facts.of(call["input"])
    return slice_of_masks(call, fact) if isinstance(fact, Masks) else row_local(call, facts)
