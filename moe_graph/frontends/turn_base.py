"""What a turn of a loop over experts knows of its names, and of the number of the expert.

``value`` dispatches on the kind of an expression; the rules are in ``turn_index``, ``turn_tests``
and ``turn_calls``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

from moe_graph.frontends.choices import Choices
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.rows import keeps_rows
from moe_graph.frontends.spelling import whole_number
from moe_graph.frontends.values import (
    Count,
    Cursor,
    Expert,
    Key,
    OfModules,
    Rows,
    Same,
    Selection,
    Static,
    Truth,
    Value,
)


class TurnBase:
    """Values of expressions.

    Attributes:
        names: what is known of the names that the loop and this turn have bound so far.
        expert: name of the number of the expert.
        bound: names that a turn binds somewhere.
        carried: those of them that are read before.
        key: the choice that the loop is about, None until the first one is met.
        parts: names of tensors whose rows of this expert are sliced out, and the name of the list
            that holds them by expert.
        things: modules and parameters that every turn indexes by the expert, and their lengths.
        masks: names of masks of this choice that are indexed by the expert, and the axes.
        compared: the number of the expert is compared with something.
        conditional: how many tests of other things the statement at hand depends on.
        written: what is known of the tensors that turns write to.
        tests: number of tests for tokens that were left out.
    """

    def __init__(self, choices: Choices, names: dict[str, Value], bound: set[str]) -> None:
        self.names = dict(names)
        self.expert = next(name for name, value in names.items() if isinstance(value, Expert))
        self.bound = bound
        self.carried: set[str] = set()
        self.key: Key | None = None
        self.parts: dict[str, str] = {}
        self.things: list[tuple[ast.expr, int]] = []
        self.masks: list[tuple[str, int]] = []
        self.compared = False
        self.conditional = 0
        self.written: list[tuple[ast.AST, Value]] = []
        self.tests = 0
        self._choices = choices
        self._reading = choices.reading
        self._instead: dict[int, ast.expr] = {}

    def name(self, name: str) -> Value:
        """Return what is known of a name."""
        if name in self.names:
            return self.names[name]
        if name in self.bound:
            before = self._choices.name(name)
            self.carried.add(name)
            if _is_zero(before):
                return Cursor(("start", name), end=False)
            return Same(name)
        return self._choices.name(name)

    def write(self, node: ast.AST, target: ast.expr) -> None:
        """Note that a turn writes to a tensor, where this expert's tokens select."""
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            self.written.append((node, self._choices.name(target.id)))

    def rewritten(self, node: ast.stmt) -> ast.stmt:
        """Return a statement with the noted nodes in place of others."""
        return _Rewriter(self._instead).visit(node) if self._instead else node

    def rewritten_expression(self, node: ast.expr) -> ast.expr:
        """Return an expression with the noted nodes in place of others."""
        return _Rewriter(self._instead).visit(node) if self._instead else node

    def truth(self, node: ast.expr) -> Value:
        """Return what is known of a test: a number of slots counts as whether it is not zero."""
        value = self.value(node)
        if isinstance(value, Selection):  # the number of the expert, compared with a number
            self.compared = True
            return Value()
        return Truth(value.key, when_empty=False) if isinstance(value, Count) else value

    def value(self, node: ast.expr) -> Value:
        """Return what is known of an expression, looking at every call in it.

        Raises:
            Refusal: something in it may have an effect, or needs the expert as a tensor.
        """
        if isinstance(node, ast.Name):
            return self._loaded(node)
        if isinstance(node, ast.Constant):
            return Static(node.value)
        rule: Callable[[ast.expr], Value] | None = getattr(
            self, f"_of_{type(node).__name__.lower()}", None
        )
        if rule is not None:
            return rule(node)
        if isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.Await | ast.Yield):
            raise Refusal("statement", node, ast.unparse(node), "plain expressions")
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.value(part)
        return Value()

    # Names and numbers.

    def _loaded(self, node: ast.Name) -> Value:
        value = self.name(node.id)
        if isinstance(value, Expert) and value.form != "int":
            raise Refusal(
                "expert-number",
                node,
                f"the number of the expert as a tensor, {node.id}",
                "it as an index, in a comparison, or as a number",
                f"write {node.id}.item()",
            )
        return value

    def _expert(self, node: ast.expr) -> Expert | None:
        """Return the number of the expert, however it is made a number."""
        if isinstance(node, ast.Name):
            value = self.name(node.id)
            return value if isinstance(value, Expert) else None
        inner: ast.expr | None = None
        if isinstance(node, ast.Subscript) and whole_number(node.slice) == 0:
            inner, form = node.value, "scalar"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            inner = node.func.value
            form = {"item": "int", "squeeze": "scalar", "tolist": "int"}.get(node.func.attr, "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
            inner, form = node.args[0], "int" if node.func.id == "int" else ""
        expert = self._expert(inner) if inner is not None and form else None
        if expert is None or inner is None:
            return None
        self._instead[id(node)] = self._instead.get(id(inner), inner)
        return Expert("int" if expert.form == "int" else form)

    def as_rows(self, value: Value) -> Value:
        """Return what modules made of rows as rows, if each of them keeps their number."""
        if isinstance(value, OfModules) and all(map(keeps_rows, value.modules)):
            return Rows(value.key, leading=True)
        return value

    def _size(self, value: Value, axis: int | None) -> Value:
        """Return the size of an axis: of the first one of rows it is the number of slots."""
        if isinstance(value, Rows) and value.counted and axis == 0:
            return Count(value.key)
        return Value()

    def of_this_loop(self, value: Value) -> Value:
        """Return a selection, or a count, of the choice that the loop is about, else nothing."""
        if not isinstance(value, Selection | Count):
            return value
        if self.key is None:
            self.key = value.key
        return value if value.key == self.key else Value()


def _is_zero(value: Value) -> bool:
    return isinstance(value, Static) and type(value.thing) is int and value.thing == 0


class _Rewriter(ast.NodeTransformer):
    """Puts nodes in place of others, and copies what is above them."""

    def __init__(self, instead: dict[int, ast.expr]) -> None:
        self._instead = instead

    def visit(self, node: ast.AST) -> Any:
        written = copy.copy(self._instead.get(id(node), node))
        for field, value in ast.iter_fields(written):
            if isinstance(value, list):
                setattr(written, field, list(value))
        return self.generic_visit(written)
