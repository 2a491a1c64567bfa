"""Graph breaks inside loops over experts, for the report.

Where dynamo breaks in such a loop, the passes get the router and the experts in different graphs,
or not at all, and no layer is in the report. What dynamo says of the break names the lines of the
model; the functions around them are looked through for loops that ``prepare`` may lift.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from moe_graph.frontends.loops import lift_loops
from moe_graph.frontends.purity import Reading
from moe_graph.frontends.source import Source
from moe_graph.provenance import short_path
from moe_graph.report import LayerReport, Reason

FORM = "expert-loop"

_HINT = (
    "moe_graph.prepare(model) before torch.compile lifts such loops; "
    "moe_graph.preparation(model) tells why it left one"
)

Place = tuple[str, int]
"""A file and a line."""


def places_of(break_: Any) -> list[Place]:
    """Return the lines of the model at which dynamo broke, from the outermost function inwards.

    Args:
        break_: an exception of dynamo, or its reason for ending a graph.
    """
    stack = getattr(break_, "real_stack", None) or getattr(break_, "user_stack", None) or []
    return [(frame.filename, frame.lineno) for frame in stack if frame.lineno]


@dataclass(frozen=True)
class BrokenLoop:
    """A loop over experts in which dynamo broke.

    Attributes:
        report: of the loop.
        around: ``file:line`` of every line of the function that it is in.
    """

    report: LayerReport
    around: frozenset[str]


def broken_loops(places: Iterable[Place], why: str) -> list[BrokenLoop]:
    """Return the loops over experts of the innermost function that has some.

    Args:
        places: see :func:`places_of`.
        why: what dynamo says of the break.
    """
    for file, line in reversed(list(places)):
        loops, lines = _expert_loops(file, line)
        around = frozenset(f"{short_path(file)}:{number}" for number in lines)
        if loops:
            return [
                BrokenLoop(_report(file, number, header, why), around) for number, header in loops
            ]
    return []


def _report(file: str, line: int, header: str, why: str) -> LayerReport:
    source = f"{short_path(file)}:{line}"
    want = "the whole loop in one graph"
    reason = Reason("graph-break", header, source, why.strip().partition("\n")[0], want, _HINT)
    return LayerReport("", source, "kept", form=FORM, reasons=[reason])


@functools.cache
def _expert_loops(file: str, line: int) -> tuple[tuple[tuple[int, str], ...], range]:
    """Return line and header of the expert loops in the function around a line, and its lines."""
    function = _function_around(file, line)
    if function is None:
        return (), range(0)
    module = next(
        (module for module in list(sys.modules.values()) if _file_of(module) == file), None
    )
    stand_in = FunctionType((lambda: None).__code__, vars(module) if module else {})
    found = lift_loops(Reading(Source(stand_in, function, file), None))
    loops = [*found.loops, *(loop for loop, _ in found.refused)]
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    return tuple((loop.lineno, ast.unparse(loop).partition("\n")[0]) for loop in loops), lines


def _file_of(module: Any) -> str | None:
    return getattr(module, "__file__", None)


def _function_around(file: str, line: int) -> ast.FunctionDef | None:
    found = None
    for node in ast.walk(_tree(file)):
        inside = isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        if inside and isinstance(node, ast.FunctionDef):
            found = node  # walked from the outermost inwards
    return found


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])
