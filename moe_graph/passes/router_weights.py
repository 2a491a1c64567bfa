"""What a router does to the scores of the chosen experts, read forwards from the choice.

::

    w = topk(scores, K)[0]               the scores of the chosen experts,
    w = scores.gather(1, ids)            one and the same; without the bias that chose them
    w = w / (w.sum(-1, True) + eps)      also in place, or a sum that clamps at no reachable bound
    w = w * factor
    w = w.to(x.dtype)                    rounds: nothing after it is the op's

Each line is one step, and :func:`weights_of` yields the weights after each of them. How far an op
may go depends on what else reads the values between, which is for the plan to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moe_graph.ops.defs.gating.norms import SOFTMAX
from moe_graph.passes import meta
from moe_graph.passes.canonical import Call, is_complete
from moe_graph.passes.router_scores import FLOATS
from moe_graph.passes.router_selection import Selection
from moe_graph.passes.router_values import FULL, Values, argument, is_last_dim, number


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights ``[..., K]`` in the making.

    Attributes:
        call: what makes them.
        path: nodes that gradients pass between these weights and the scores.
        softmaxed: a softmax over the k was taken.
        divided: they were divided by their sum plus `eps`.
        eps: see `divided`.
        factor: what they were multiplied by.
    """

    call: Call
    path: tuple[Node, ...]
    softmaxed: bool = False
    divided: bool = False
    eps: float = 0.0
    factor: float = 1.0

    @property
    def node(self) -> Node:
        """The node that holds them."""
        return self.call.node


def weights_of(values: Values, selection: Selection) -> list[list[Weights]]:
    """Return, for every reading of the chosen scores, the weights after 0, 1, 2, ... steps."""
    readings = [*_results(values, selection), *_gathers(values, selection)]
    return [list(_steps(values, selection, first)) for first in readings]


def _results(values: Values, selection: Selection) -> Iterator[Weights]:
    """Yield the values that the choice itself returns, where these are the scores."""
    between = _between(values, selection)
    if selection.ranking.bias is not None or between is None:
        return
    for user in selection.choice.node.users:
        call = values.call(user)
        if call.op == "result" and call["index"] == 0:
            yield Weights(call, (user, *between))


def _between(values: Values, selection: Selection) -> list[Node] | None:
    """Return the nodes from the scores to the choice; None if a detach is among them."""
    scores = selection.scores
    end = scores.logits if scores.norm is None else scores.call.node
    found: dict[Node, None] = {}
    pending = [selection.choice.node]
    while pending:
        node = pending.pop()
        if node is end or node in found or values.position(node) < values.position(end):
            continue
        if values.call(node).op == "detach":
            return None
        found[node] = None
        pending += node.all_input_nodes
    return list(found)


def _gathers(values: Values, selection: Selection) -> Iterator[Weights]:
    """Yield the gathers of scores at the ids."""
    ids = selection.ids
    indices = [ids, *(u for u in ids.users if values.plain(values.call(u)) is values.call(ids))]
    for index in indices:
        for user in index.users:
            call = values.call(user)
            source = values.operand(call, "input") if _gathers_at(values, call, index) else None
            if source is None:
                continue
            if source is selection.scores.call:
                yield Weights(call, (user, source.node))
            elif selection.scores.norm is None and _softmax_of_chosen(values, source, selection):
                yield Weights(call, (user, source.node), softmaxed=True)


def _gathers_at(values: Values, call: Call, index: Node) -> bool:
    """Tell whether a call reads a matrix at the ids of each row."""
    if not is_complete(call):
        return False
    if call.op == "gather":
        return call["index"] is index and is_last_dim(call["dim"], call["input"])
    if call.op != "index" or len(call["indices"]) != 2 or call["indices"][1] is not index:
        return False
    rows = values.made(call["indices"][0], call.node)
    if rows is None or rows.op != "reshape" or len(meta.shape(call["input"])) != 2:
        return False
    column = meta.same_shape(meta.shape(rows.node), (meta.shape(index)[0], 1))
    numbers = values.operand(rows, "input")
    counts = numbers is not None and numbers.op == "arange"
    return column and counts and (numbers["start"], numbers["step"]) == (0, 1)  # type: ignore[index]


def _softmax_of_chosen(values: Values, call: Call, selection: Selection) -> bool:
    """Tell whether `call` is a softmax of -inf with the chosen logits at their experts."""
    if call.op != "softmax" or not is_last_dim(call["dim"], call.node):
        return False
    spread = values.operand(call, "input")
    if spread is None or spread.op != "scatter" or not is_last_dim(spread["dim"], spread.node):
        return False
    base, chosen = values.operand(spread, "input"), values.operand(spread, "src")
    if base is None or base.op not in FULL or chosen is None:
        return False
    at_ids = values.plain(values.made(spread["index"], spread.node)) is values.call(selection.ids)
    is_result = chosen.op == "result" and chosen["input"] is selection.choice.node
    return (
        number(base["fill_value"]) == -torch.inf and at_ids and is_result and chosen["index"] == 0
    )


def _steps(values: Values, selection: Selection, weights: Weights) -> Iterator[Weights]:
    current: Weights | None = weights
    while current is not None and meta.same_shape(
        meta.shape(current.node), meta.shape(selection.ids)
    ):
        yield current
        current = _next_step(values, selection, current)


def _next_step(values: Values, selection: Selection, weights: Weights) -> Weights | None:
    """Return the weights after the one step that follows, None if no known one does."""
    aliases = values.aliases(weights.node)
    users = sorted({u for alias in aliases for u in alias.users}, key=values.position)
    for user in users:
        call = values.call(user)
        if not meta.is_tensor(user) or not call.known or not is_complete(call):
            continue
        operands = [name for name in ("input", "other") if meta.is_tensor(call.get(name))]
        if not any(values.made(call[name], user) is weights.call for name in operands):
            continue
        after = _step(values, selection, weights, call)
        if after is not None:
            return replace(after, call=call, path=(user, *weights.path))
    return None


def _step(values: Values, selection: Selection, weights: Weights, call: Call) -> Weights | None:
    before, after = meta.dtype(weights.node), meta.dtype(call.node)
    if selection.scores.norm is None and not weights.softmaxed:
        if call.op == "cast":
            return weights if before in FLOATS and after is torch.float32 else None
        # Of a dtype that is asked for the values are rounded to it before anything else.
        keeps = before in FLOATS and after in (before, torch.float32)
        softmax = call.op == "softmax" and is_last_dim(call["dim"], call.node)
        return replace(weights, softmaxed=True) if softmax and keeps else None
    if before is not torch.float32:
        return None
    if call.op == "cast":
        return weights if after in FLOATS else None
    if after is not torch.float32:
        return None
    if call.op == "mul":
        factors = (number(call["input"]), number(call["other"]))
        factor = next((f for f in factors if f is not None), None)
        return None if factor is None else replace(weights, factor=weights.factor * factor)
    is_division = call.op == "div" and call["rounding_mode"] is None
    if not is_division or weights.divided or weights.factor != 1.0:
        return None
    eps = _eps_of_total(values, call, weights, selection)
    return None if eps is None else replace(weights, divided=True, eps=eps)


def _eps_of_total(
    values: Values, division: Call, weights: Weights, selection: Selection
) -> float | None:
    """Return what is added to the sum of the weights that divides them, None if it is no such."""
    if values.made(division["input"], division.node) is not weights.call:
        return None
    total = values.operand(division, "other")
    column = (*meta.shape(selection.ids)[:-1], 1)
    if total is None or not meta.same_shape(meta.shape(total.node), column):
        return None
    total = _behind_reshape(values, total)
    eps = 0.0
    if total.op == "add" and total.get("alpha") in (1, None):
        added = number(total["other"])
        inner = values.operand(total, "input")
        if added is None or inner is None:
            return None
        total, eps = inner, added
    elif total.op in ("clamp", "clamp_min"):
        inner = values.operand(total, "input")
        if inner is None or not _clamps_nothing(total, selection):
            return None
        total = inner
    total = _behind_reshape(values, total)
    if total.op != "sum" or values.operand(total, "input") is not values.plain(weights.call):
        return None
    dim = total["dim"]
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    return eps if is_last_dim(dim, weights.node) else None


def _behind_reshape(values: Values, call: Call) -> Call:
    """Return what a reshape of one number per token reads."""
    inner = values.operand(call, "input") if call.op == "reshape" else None
    return call if inner is None else inner


def _clamps_nothing(clamp: Call, selection: Selection) -> bool:
    """Tell whether a lower bound is below every sum of the k largest of a softmax.

    That sum is K / E at least, if the k are chosen by the softmax alone.
    """
    low: Any = argument(clamp, "min", 1)
    high = argument(clamp, "max", 2) if clamp.op == "clamp" else None
    experts = meta.shape(selection.ranked.node)[-1]
    if selection.scores.norm != SOFTMAX or not selection.is_plain or not isinstance(experts, int):
        return False
    bound = number(low)
    return high is None and bound is not None and bound <= 0.5 * selection.root.top_k / experts
