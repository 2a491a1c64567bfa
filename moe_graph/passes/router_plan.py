"""Which op computes a router, and how far: the plan that the rewrite carries out.

==========================================  =====================================================
router                                      op
==========================================  =====================================================
softmax, top-k                              MoeGatingTopKSoftmax
top-k, softmax                              MoeGatingTopKSoftmaxV2, ``renorm=1``
softmax with bias, groups, sum, factor      MoeGatingTopK, ``norm_type=0``
sigmoid [bias, groups], sum [factor]        MoeGatingTopK, ``norm_type=1``
sigmoid or softmax with bias or groups,     MoeGatingTopK for the ids alone
other weights
==========================================  =====================================================

An op goes as far as the source computes what the op computes and nothing else reads a value in
between; the rest of the source stays behind it. An op that would leave the top-k of the source in
place is no gain and is not used.

The ops choose the lower expert of two with equal scores. ``torch.topk`` says nothing about ties, so
that the op's choice is one that it may make as well; ``argmax`` and ``max`` choose the first. Where
ties are common, in logits of 16 bits, a router is lowered only if the settings ask for it.

What an op rounds, it rounds once, from fp32. It gets logits of 16 bits where the source rounds the
weights to that dtype, or none of the weights are the op's; everywhere else it gets fp32 logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

import moe_graph.ops  # noqa: F401  registers the torch ops
from moe_graph.ops.defs.gating.norms import SOFTMAX
from moe_graph.passes import meta
from moe_graph.passes.misses import Miss
from moe_graph.passes.router_region import falls_away
from moe_graph.passes.router_scores import FLOATS
from moe_graph.passes.router_selection import Selection
from moe_graph.passes.router_values import Values
from moe_graph.passes.router_weights import Weights, weights_of

_ops = torch.ops.moe_graph
TORCH_OPS = {
    "MoeGatingTopK": _ops.moe_gating_top_k.default,
    "MoeGatingTopKSoftmax": _ops.moe_gating_top_k_softmax.default,
    "MoeGatingTopKSoftmaxV2": _ops.moe_gating_top_k_softmax_v2.default,
}
RANKS = {"MoeGatingTopK": 2, "MoeGatingTopKSoftmax": 3, "MoeGatingTopKSoftmaxV2": 3}
"""The largest rank of logits that an op takes."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One op in place of a router.

    Attributes:
        selection: the choice of the source.
        ge_type: the op.
        attributes: of the op.
        logits: node that it reads.
        dtype: dtype that it reads them in.
        bias: node that it selects with, or None.
        at: node that the op stands before.
        weights: nodes that its weights replace.
        dead: nodes that fall away.
    """

    selection: Selection
    ge_type: str
    attributes: dict[str, Any]
    logits: Node
    dtype: torch.dtype
    bias: Node | None
    at: Node
    weights: list[Node]
    dead: set[Node]


def plans_for(values: Values, selection: Selection) -> Iterator[Plan | Miss]:
    """Yield the plans for a router, those first whose op does most, and why others do not hold.

    The first that says why not is the one to report where no plan holds.
    """
    ids = selection.ids
    if values.written(ids, ids):
        yield _miss(selection, "router-ids", "ids that are written in place", "ids that stay")
        return
    if selection.doubt is not None:
        yield selection.doubt
    for weights in _ends(values, selection):
        yield _plan(values, selection, weights)


def _ends(values: Values, selection: Selection) -> Iterator[list[Weights]]:
    """Yield the weights that an op may be asked for, the furthest first, none at all last."""
    readings = weights_of(values, selection)
    for steps in readings:
        yield from ([weights] for weights in reversed(steps))
    if len(readings) > 1:
        yield [steps[0] for steps in readings]
    yield []


def _plan(values: Values, selection: Selection, ends: list[Weights]) -> Plan | Miss:
    call = _op_of(selection, ends[0] if ends else None)
    if isinstance(call, Miss):
        return call
    ge_type, attributes = call
    leading = meta.shape(selection.ids)[:-1]
    if len(leading) >= RANKS[ge_type] and sum(not isinstance(dim, int) for dim in leading) > 1:
        return _miss(
            selection,
            "router-shape",
            f"ids {list(meta.shape(selection.ids))}",
            f"one unknown size before top_k, which {ge_type} needs as one dimension",
            "flatten the tokens before the router",
        )
    logits, dtype = _logits(values, selection, meta.dtype(ends[0].node) if ends else None)
    operands = [n for n in (logits, selection.ranking.bias) if n is not None]
    places = [selection.scores.reader, selection.ranking.call.node, selection.choice.node]
    after = max(map(values.position, operands))
    at = next((n for n in places if values.position(n) > after), None)
    if at is None or _is_written(values, selection, logits, at):
        return _miss(
            selection, "router-in-place", "logits or bias written in place", "values that stay"
        )
    path = {n for end in ends for n in end.path}
    if len({values.records_gradients(n) for n in (at, *path)}) != 1:
        return _miss(
            selection, "router-grad", "gradients switched within the router", "one grad mode"
        )
    replaced = [selection.ids, *(end.node for end in ends)]
    dead = falls_away(values, replaced, set(operands))
    if dead is None or selection.choice.node not in dead:
        return _miss(
            selection,
            "router-users",
            "other uses of what the router computes on the way",
            "the ids, and the weights that the op computes, as the only results",
            _what_ops_compute(selection),
        )
    weights = [end.node for end in ends]
    bias = selection.ranking.bias
    return Plan(selection, ge_type, attributes, logits, dtype, bias, at, weights, dead)


def _op_of(selection: Selection, end: Weights | None) -> tuple[str, dict[str, Any]] | Miss:
    """Return the op that computes the weights `end`, or the ids alone, and its attributes."""
    norm, top_k = selection.scores.norm, selection.root.top_k
    plain = selection.is_plain
    if norm is None:
        if end is not None and end.softmaxed and end.factor == 1.0 and not end.divided:
            return "MoeGatingTopKSoftmaxV2", {"k": top_k, "renorm": 1}
        return _miss(
            selection,
            "router-weights",
            "a choice by logits with weights that are no softmax of the k",
            "scores by softmax or sigmoid, or a softmax of the chosen logits",
        )
    if norm == SOFTMAX and plain and end is not None and not end.divided and end.factor == 1.0:
        return "MoeGatingTopKSoftmax", {"k": top_k}
    divides = norm != SOFTMAX or (end is not None and end.divided)
    if end is None and plain:
        return _miss(
            selection,
            "router-weights",
            "weights that no op computes of these scores",
            "weights of the chosen scores; of a sigmoid divided by their sum",
            _what_ops_compute(selection),
        )
    if end is not None and divides and not end.divided:
        return _miss(
            selection,
            "router-weights",
            "weights that are not divided by their sum",
            "a division, which MoeGatingTopK makes of all scores that are no softmax",
        )
    attributes: dict[str, Any] = {"k": top_k, "norm_type": norm}
    if selection.groups is not None:
        attributes |= {
            "k_group": selection.groups.kept,
            "group_count": selection.groups.count,
            "group_select_mode": selection.groups.mode,
        }
    if end is not None:
        attributes |= {"renorm": int(end.divided), "eps": end.eps}
        attributes |= {"routed_scaling_factor": end.factor}
    return "MoeGatingTopK", attributes


def _what_ops_compute(selection: Selection) -> str:
    if selection.ranking.bias is not None:
        return "take the weights by gather from the scores without the bias"
    return ""


def _logits(
    values: Values, selection: Selection, wanted: torch.dtype | None
) -> tuple[Node, torch.dtype]:
    """Return what the op reads, and the dtype to read it in.

    `wanted` is the dtype of the weights, None if the op makes none of them.
    """
    given = selection.scores.logits
    bias = selection.ranking.bias
    made = values.made(given, selection.scores.reader)
    sources = [given]
    if made is not None and made.op == "cast" and made.writes is None:
        narrow = made["input"]
        if meta.dtype(narrow) in FLOATS and meta.dtype(given) is torch.float32:
            sources.append(narrow)
    for source in reversed(sources):
        kind = meta.dtype(source)
        if wanted in (None, kind) and (bias is None or meta.dtype(bias) is kind):
            return source, kind
    return given, torch.float32


def _is_written(values: Values, selection: Selection, logits: Node, at: Node) -> bool:
    """Tell whether the op reads another value than the source, or not the one it keeps."""
    reader, bias = selection.scores.reader, selection.ranking.bias
    reads = [(logits, reader)]
    if logits is not selection.scores.logits:
        reads.append((logits, selection.scores.logits))
    if bias is not None:
        reads.append((bias, selection.ranking.call.node))
    # The gradient of a softmax is made of its result, that of the op of the logits.
    return values.written(logits, at) or any(
        values.written(value, *sorted((node, at), key=values.position)) for value, node in reads
    )


def _miss(selection: Selection, check: str, got: str, want: str, hint: str = "") -> Miss:
    return Miss(check, selection.choice.node, selection.root, got, want, hint)
