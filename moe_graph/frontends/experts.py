"""What a loop over experts runs over, and what it runs over once it is lifted."""

from __future__ import annotations

import ast
from types import ModuleType
from typing import TypeGuard

from torch import nn

from moe_graph.frontends.choices import Choices
from moe_graph.frontends.purity import MISSING
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.spelling import spelled
from moe_graph.frontends.turn_values import TurnValues
from moe_graph.frontends.values import (
    Count,
    Counts,
    Cursor,
    Expert,
    Hits,
    Key,
    Mask,
    Named,
    OneOf,
    Value,
)


def is_over_experts(node: ast.For, choices: Choices) -> bool:
    """Whether the data decide how often a loop runs, or what it reads from a list on the host."""
    return isinstance(_listed(node, choices), Hits | Counts)


def key_of_loop(node: ast.For, choices: Choices) -> Key | None:
    """Return the choice that a loop is about, None where only its turns tell."""
    over = _listed(node, choices)
    if isinstance(over, Hits):
        return over.counts.key
    return over.key if isinstance(over, Counts) else None


def runs_over_unknown_hits(node: ast.For, choices: Choices) -> bool:
    """Whether a loop looks up the tokens of each element of something that is not known."""
    if not _name(node.target) or not isinstance(_listed(node, choices), Named):
        return False
    for part in (part for statement in node.body for part in ast.walk(statement)):
        call = spelled(part, choices.reading) if isinstance(part, ast.Call) else None
        if call is not None and call.name in ("where", "nonzero") and len(call.args) == 1:
            names = {name.id for name in ast.walk(call.args[0]) if _name(name)}
            if node.target.id in names:
                return True
    return False


def may_ask_for_tokens(node: ast.For, choices: Choices, names: dict[str, Value]) -> bool:
    """Whether a loop compares the number of an expert with ids, or looks it up in masks."""
    experts = {name for name, value in names.items() if isinstance(value, Expert)}
    for part in (part for statement in node.body for part in ast.walk(statement)):
        if isinstance(part, ast.Compare | ast.Call):
            call = spelled(part, choices.reading)
            sides = call.args if call is not None and call.name == "eq" else []
            if any(_name(side) and side.id in experts for side in sides):
                return True
        if isinstance(part, ast.Subscript) and isinstance(choices.value(part.value), Mask | Counts):
            return True
    return False


def targets_of(node: ast.For, choices: Choices) -> dict[str, Value] | None:
    """Return what the names stand for that a loop binds, None if it is not about experts."""
    over = _listed(node, choices)
    target = node.target
    if isinstance(over, Hits) and over.element != "table" and isinstance(target, ast.Name):
        return {target.id: Expert(over.element)}
    numbered = _numbered(node)
    if numbered is None:
        return {target.id: Expert()} if _is_range(node, choices) and _name(target) else None
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return None
    number, item = target.elts
    if isinstance(over, Hits) or not _name(number):
        return None
    names: dict[str, Value] = {part.id: Value() for part in ast.walk(item) if _name(part)}
    if isinstance(over, Counts) and _name(item) and not over.positive:
        names[item.id] = Cursor(over.key, end=True) if over.running else Count(over.key)
    elif _name(item):
        things = _things(numbered, choices)
        if things is not None:
            names[item.id] = OneOf(things)
    names[number.id] = Expert()
    return names


def number_of_experts(node: ast.For, choices: Choices, values: TurnValues) -> ast.expr | None:
    """Return the expression of the number of experts that a lifted loop runs over.

    None if the loop runs over them as it is.

    Raises:
        Refusal: nothing tells their number.
    """
    over = _listed(node, choices)
    if not isinstance(over, Hits | Counts):
        return None
    counts = over.counts if isinstance(over, Hits) else over
    classes = counts.mask.classes if counts.mask is not None else None
    rows = choices.reading.static(classes) if classes is not None else MISSING
    shortest = min(values.things, key=lambda thing: thing[1], default=None)
    has_more_rows = (
        shortest is not None
        and isinstance(rows, int)
        and shortest[1] < rows
        and not values.compared
    )
    all_indexed = shortest is not None and counts.mask is None and not values.compared
    if shortest is not None and (all_indexed or has_more_rows):
        # A number beyond them would have been an error.
        return ast.parse(f"len({ast.unparse(shortest[0])})", mode="eval").body
    if values.masks:
        name, axis = values.masks[0]
        return ast.parse(f"{name}.shape[{axis}]", mode="eval").body
    size = classes if counts.mask is not None else counts.size
    if size is not None and counts.mask is not None:
        return size
    raise Refusal(
        "number-of-experts",
        node,
        f"a loop over {ast.unparse(node.iter)}",
        "a mask, a list of modules or a parameter that is indexed by the expert",
    )


def splits(node: ast.For, choices: Choices, values: TurnValues) -> list[ast.stmt]:
    """Return the statements that cut each sliced tensor into the rows of the experts.

    Raises:
        Refusal: the counts are not known at the loop.
    """
    counts = _counts_of(choices, values)
    if counts is None or not choices.unchanged(counts):
        raise Refusal(
            "counts", node, f"a loop over {ast.unparse(node.iter)}", "counts that are known there"
        )
    sizes = ast.unparse(counts.tensor)
    if counts.mask is None:
        sizes = _counted_without_bincount(node, choices, values, counts)
    code = [f"_counts_by_expert = {sizes}.tolist()"]
    code += [f"{parts} = {name}.split(_counts_by_expert)" for name, parts in values.parts.items()]
    return ast.parse("\n".join(code)).body


def _counted_without_bincount(
    node: ast.For, choices: Choices, values: TurnValues, counts: Counts
) -> str:
    """``bincount`` has as many counts as the data say; this has one for each expert."""
    experts = number_of_experts(node, choices, values)
    ids = counts.tensor
    assert isinstance(ids, ast.Call)
    method = isinstance(ids.func, ast.Attribute) and not _is_torch(ids.func.value, choices)
    flat = ast.unparse(ids.func.value if method else ids.args[0])  # type: ignore[attr-defined]
    number = ast.unparse(experts) if experts is not None else "None"
    return (
        f"{flat}.long().new_zeros({number})"
        f".scatter_add(0, {flat}.long(), {flat}.long().new_ones({flat}.shape))"
    )


def _counts_of(choices: Choices, values: TurnValues) -> Counts | None:
    found = [
        value
        for value in choices.values.values()
        if isinstance(value, Counts) and value.key == values.key and not value.positive
    ]
    return found[-1] if found else None


def _is_torch(node: ast.expr, choices: Choices) -> bool:
    return isinstance(choices.reading.static(node), ModuleType)


def _listed(node: ast.For, choices: Choices) -> Value:
    numbered = _numbered(node)
    return choices.value(node.iter if numbered is None else numbered)


def _numbered(node: ast.For) -> ast.expr | None:
    over = node.iter
    if (
        isinstance(over, ast.Call)
        and isinstance(over.func, ast.Name)
        and over.func.id == "enumerate"
        and len(over.args) == 1
    ):
        return over.args[0]
    return None


def _is_range(node: ast.For, choices: Choices) -> bool:
    over = node.iter
    return isinstance(over, ast.Call) and choices.reading.static(over.func) is range


def _things(node: ast.expr, choices: Choices) -> tuple[nn.Module, ...] | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value if node.func.attr in ("values", "children") else node
    held = choices.reading.static(node)
    return tuple(held.children()) if isinstance(held, nn.Module) else None


def _name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)
