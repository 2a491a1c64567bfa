"""Which groups of experts take part in a choice.

::

    groups = ranking.view(T, G, S)                             groups of S experts
    best = groups.topk(2, -1)[0].sum(-1).topk(g, -1)[1]        or groups.amax(-1), max(-1)
    mask = zeros(T, G).scatter_(1, best, 1)                    or ones and 0, True and False
    mask = mask.unsqueeze(-1).expand(T, G, S).reshape(T, E)    or repeat_interleave, or [T, G, 1]
    masked = ranking.masked_fill(~mask.bool(), -inf)           or where, or a product with the mask

becomes ``Groups(count=G, kept=g, mode=two largest)``.

MoeGatingTopK gives experts of other groups -inf. A source that gives them 0.0 chooses the same as
long as no score of its own groups is below that: scores are not, scores with a bias may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from moe_graph.ops.defs.gating.moe_gating_top_k import LARGEST, TWO_LARGEST
from moe_graph.passes import meta
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import Root
from moe_graph.passes.misses import Miss
from moe_graph.passes.router_scores import Ranking, read_ranking
from moe_graph.passes.router_values import (
    FULL,
    ONES,
    ZEROS,
    Values,
    argument,
    is_last_dim,
    number,
)

_LOWEST = (-math.inf, torch.finfo(torch.float32).min)


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of equal size, of which some take part.

    Attributes:
        count: number of groups.
        kept: number of groups that take part.
        mode: score of a group, as MoeGatingTopK numbers it.
    """

    count: int
    kept: int
    mode: int


@dataclass(frozen=True, eq=False)
class _Masked:
    """Scores with a number in the place of some.

    Attributes:
        data: what made the scores.
        mask: what made the mask.
        fill: the number.
        keeps: whether the mask is true where the scores stay.
    """

    data: Call
    mask: Call
    fill: float
    keeps: bool


def read_groups(values: Values, call: Call, root: Root) -> tuple[Ranking, Groups] | Miss | None:
    """Return the ranking and the groups that `call` masks it by; None if it masks nothing."""
    experts = meta.shape(call.node)[-1]
    if call.op == "reshape":
        before = values.operand(call, "input", detached=True)
        if before is None or len(meta.shape(before.node)) != 3:
            return None
        call = before
    masked = _read_masked(values, call)
    if masked is None:
        return None
    miss = partial(Miss, "router-groups", call.node, root)
    shape = meta.shape(masked.data.node)
    data = masked.data
    if data.op == "reshape" and len(shape) == 3:
        flat = values.operand(data, "input", detached=True)
        data = flat if flat is not None else data
    best = _read_mask(values, masked)
    if best is None:
        return miss(f"a mask that {masked.mask.op} makes", "the mask of the best groups of experts")
    choice, count = best
    mode = _read_group_scores(values, choice, data, count)
    if mode is None or not isinstance(experts, int) or experts % count:
        return miss(
            "groups by other scores than those that the experts are chosen by",
            "the largest score of each group of equal size, or the sum of its two largest",
        )
    ranking = read_ranking(values, data, root)
    if not isinstance(ranking, Ranking):
        return ranking or miss("logits masked by groups", "scores by softmax or sigmoid")
    if masked.fill not in _LOWEST and (masked.fill != 0.0 or ranking.bias is not None):
        return miss(
            f"scores of other groups set to {masked.fill}",
            "-inf, as MoeGatingTopK sets; 0.0 may be above a score with its bias",
            "mask with float('-inf')",
        )
    return ranking, Groups(count, choice["k"], mode)


def _read_masked(values: Values, call: Call) -> _Masked | None:
    operand = partial(values.operand, call, detached=True)
    if call.op == "masked_fill":
        data, mask, fill, keeps = operand("input"), operand("mask"), call["value"], False
    elif call.op == "where":
        mask = operand("condition")
        kept, dropped = ("input", "other"), ("other", "input")
        keeps = _constant(values, call, "other") is not None
        scores, filling = kept if keeps else dropped
        data, fill = operand(scores), _constant(values, call, filling)
    elif call.op == "mul":
        data, mask, fill, keeps = operand("input"), operand("other"), 0.0, True
        if mask is not None and mask.op in ("softmax", "sigmoid", "add", "sqrt"):
            data, mask = mask, data
    else:
        return None
    value = number(fill)
    if data is None or mask is None or value is None:
        return None
    return _Masked(data, mask, value, keeps)


def _constant(values: Values, call: Call, name: str) -> float | None:
    """Return the number that an argument is, or that all its elements are."""
    if not isinstance(call[name], Node):
        return number(call[name])
    made = values.operand(call, name, detached=True)
    if made is None:
        return None
    if made.op in ZEROS:
        return 0.0
    if made.op in ONES:
        return 1.0
    if made.op == "scalar_tensor":
        return number(made.get("s"))
    return number(made["fill_value"]) if made.op in FULL else None


def _read_mask(values: Values, masked: _Masked) -> tuple[Call, int] | None:
    """Return the top-k that chose the groups, and their number, if the mask keeps just these."""
    shapes: list[tuple[str, tuple[Any, ...]]] = []
    call: Call | None = masked.mask
    keeps = masked.keeps
    while call is not None and call.op != "scatter":
        if call.op in ("eq", "ne", "gt") and number(argument(call, "other", 1)) == 0.0:
            keeps = keeps != (call.op == "eq")
        elif call.op == "logical_not" or _inverts(call):
            keeps = not keeps
        elif call.op in ("reshape", "expand") or _repeats(call):
            shapes.append((call.op, meta.shape(call.node)))
        elif call.op != "cast":
            return None
        call = values.operand(call, "input", detached=True)
    if call is None or not is_last_dim(call["dim"], call.node):
        return None
    base, written = _constant(values, call, "input"), _constant(values, call, "src")
    if {base, written} != {0.0, 1.0} or keeps != (written == 1.0):
        return None
    chosen = values.operand(call, "index", detached=True)
    groups = meta.shape(call.node)
    if chosen is None or chosen.op != "result" or chosen["index"] != 1 or len(groups) != 2:
        return None
    choice = values.call(chosen["input"])
    data = meta.shape(masked.data.node)
    whole = _block_by_block(groups, list(reversed(shapes)), data)
    is_choice = choice.op == "topk" and choice["largest"] is True and isinstance(choice["k"], int)
    if not (is_choice and whole and isinstance(groups[1], int)):
        return None
    return choice, groups[1]


def _inverts(call: Call) -> bool:
    return call.op == "bitwise_not" and meta.dtype(call.node) is torch.bool


def _repeats(call: Call) -> bool:
    is_repeat = call.op == "repeat_interleave" and isinstance(call["repeats"], int)
    return is_repeat and is_last_dim(call["dim"], call.node)


def _block_by_block(
    groups: tuple[Any, ...], steps: list[tuple[str, tuple[Any, ...]]], data: tuple[Any, ...]
) -> bool:
    """Tell whether the steps spread ``[T, G]`` over `data` so that a group is a block of experts.

    ``[T, G]`` and ``[T, G, 1]`` hold a value per group, ``[T, G, S]`` and ``[T, G * S]`` the same
    value for all experts of a group. A reshape stays on one side, an expand or repeat goes over.
    """
    rows, count = groups
    experts = data[-1] if len(data) == 2 else meta.product(data[1:])
    if not isinstance(experts, int) or not isinstance(count, int) or experts % count:
        return False
    size = experts // count
    narrow: list[tuple[Any, ...]] = [(rows, count), (rows, count, 1)]
    wide: list[tuple[Any, ...]] = [(rows, experts), (rows, count, size)]
    current, spread = groups, size == 1
    for op, shape in steps:
        allowed = wide if spread else narrow
        if op != "reshape":
            axis = op == "expand"  # an expand goes over in three dimensions, a repeat in two
            allowed = [wide[axis]] if meta.same_shape(current, narrow[axis]) else []
            spread = True
        if not any(meta.same_shape(shape, other) for other in allowed):
            return False
        current = shape
    if len(data) == 3:
        fits = wide[1] if spread else narrow[1]
        return meta.same_shape(data, wide[1]) and meta.same_shape(current, fits)
    return spread and meta.same_shape(current, data)


def _read_group_scores(values: Values, choice: Call, ranked: Call, count: int) -> int | None:
    """Return how the groups that `choice` chooses among are scored, None if not by `ranked`."""
    if not is_last_dim(choice["dim"], choice["input"]):
        return None
    scores = values.operand(choice, "input", detached=True)
    if scores is None:
        return None
    if scores.op == "sum":
        dim = scores["dim"][0] if isinstance(scores["dim"], list | tuple) else scores["dim"]
        largest = values.operand(scores, "input", detached=True)
        if largest is None or not is_last_dim(dim, largest.node):
            return None
        best = _first_result(values, largest, "topk")
        if best is None or best["k"] != 2 or best["largest"] is not True:
            return None
        mode, source = TWO_LARGEST, best
    elif scores.op == "amax":
        mode, source = LARGEST, scores
    else:
        found = _first_result(values, scores, "max")
        if found is None:
            return None
        mode, source = LARGEST, found
    dim = argument(source, "dim", 1)
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    grouped = values.operand(source, "input", detached=True)
    if grouped is None or not is_last_dim(dim, grouped.node):
        return None
    shape = meta.shape(grouped.node)
    if grouped.op == "reshape":
        before = values.operand(grouped, "input", detached=True)
        grouped = before if grouped is not ranked and before is not None else grouped
    is_same = grouped is ranked and len(shape) == 3
    experts = meta.shape(ranked.node)[-1]
    blocks = (meta.shape(ranked.node)[0], count, experts // count)
    return mode if is_same and meta.same_shape(shape, blocks) else None


def _first_result(values: Values, call: Call, op: str) -> Call | None:
    """Return the call of `op` whose first result `call` takes."""
    if call.op != "result" or call["index"] != 0:
        return None
    made = values.call(call["input"])
    return made if made.op == op else None
