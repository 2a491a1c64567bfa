"""One turn of a loop over experts, for an expert that no slot chose: does it have any effect?

The statements are gone through with what is known of each value (``values``). A turn has no effect
if all it does is to bind names that nobody reads later, and to write where nothing was chosen:

::

    slot, token = torch.where(mask[e])              Rows: no elements
    if token.numel() == 0: continue                 Truth: true for such an expert, else false
    y = expert(x[token]) * w[token, slot, None]     what is called must have no effect either
    out.index_add_(0, token, y)                     writes nothing

On the way the statements are written anew without tests for tokens, with the expert as a number.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from moe_graph.frontends.choices import Choices
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.spelling import index_parts
from moe_graph.frontends.turn_values import TurnValues
from moe_graph.frontends.values import (
    Count,
    Cursor,
    EmptyList,
    Fresh,
    Key,
    Rows,
    RowsTuple,
    Same,
    Selection,
    Truth,
    Value,
)

_CONTEXTS = frozenset({"no_grad", "enable_grad", "autocast", "set_grad_enabled", "nullcontext"})


class Turn:
    """Goes through one turn.

    Attributes:
        values: values of expressions, and the nodes to put in place of others.
        lists: names of lists to which rows are appended.
    """

    def __init__(
        self, choices: Choices, body: list[ast.stmt], names: dict[str, Value], key: Key | None
    ) -> None:
        """`names` are those the loop binds; `key` is the choice it is about, if that is known."""
        self.values = TurnValues(choices, names, _bound_in(body))
        self.values.key = key
        self._own = set(names)
        self._dropped = {name for name, value in names.items() if isinstance(value, Cursor | Count)}
        self._body = body
        self.lists: set[str] = set()

    def run(self, read_later: set[str]) -> list[ast.stmt]:
        """Return the statements of a turn that need not know whether a slot chose the expert.

        Args:
            read_later: names that are read after the loop.

        Raises:
            Refusal: a turn for an expert without tokens may have an effect.
        """
        lifted = self._block(self._body)
        for name in sorted(self.values.carried | (read_later & (self.values.bound | self._own))):
            if not self._is_as_before(name, name in read_later):
                raise Refusal(
                    "carried",
                    self._body[0],
                    f"{name} goes from one turn to the next, or out of the loop",
                    "names that each turn binds for itself",
                )
        self._checks_reads(lifted)
        self._checks_writes()
        return lifted or [ast.copy_location(ast.Pass(), self._body[0])]

    def _is_as_before(self, name: str, read_later: bool) -> bool:
        """Whether a turn leaves a name as it was, or only moves it on to the next rows."""
        value = self.values.names.get(name)
        moved = isinstance(value, Cursor) and value.end and name not in self._own
        return value == Same(name) or (moved and not read_later)

    def _checks_reads(self, lifted: list[ast.stmt]) -> None:
        """Check that nothing that is left reads a number of rows."""
        for statement in lifted:
            for part in ast.walk(statement):
                if isinstance(part, ast.Name) and part.id in self._dropped:
                    raise Refusal(
                        "counts",
                        part,
                        f"{part.id}, a number of rows that only the data tell",
                        "it only in tests for tokens and in slices of rows in order",
                    )

    def _checks_writes(self) -> None:
        """Check that no turn changes which slots chose which expert."""
        key = self.values.key
        for node, value in self.values.written:
            held = getattr(value, "key", None)
            if held is not None and key is not None and held[:2] == key[:2]:
                raise Refusal(
                    "choice",
                    node,
                    "a write to the ids, or to the mask, that the loop goes by",
                    "ids that stay what they are",
                )

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        lifted: list[ast.stmt] = []
        for statement in statements:
            lifted += self._statement(statement)
        return lifted

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Assign):
            return self._assign(node, node.targets, node.value)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self._assign(node, [node.target], node.value)
        if isinstance(node, ast.AugAssign):
            return self._add(node)
        if isinstance(node, ast.Expr):
            return self._expression(node)
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.With):
            for item in node.items:
                if not self._allowed_context(item.context_expr):
                    raise self._refused("statement", node, f"with {ast.unparse(item.context_expr)}")
            body = self._block(node.body)
            lifted = ast.With(items=node.items, body=body)
            return [ast.copy_location(lifted, node)] if body else []
        if isinstance(node, ast.Pass | ast.Continue):
            return [node]
        raise self._refused("statement", node, _title(node), "statements without a way out")

    def _assign(self, node: ast.stmt, targets: list[ast.expr], right: ast.expr) -> list[ast.stmt]:
        value = self.values.value(right)
        for target in targets:
            self._bind(node, target, value)
        if isinstance(value, Cursor | Count) and all(isinstance(t, ast.Name) for t in targets):
            self._dropped |= {target.id for target in targets if isinstance(target, ast.Name)}
            return []  # where the rows of this expert are is not asked any more
        return [self.values.rewritten(node)]

    def _bind(self, node: ast.stmt, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.values.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                each = Value()
                if isinstance(value, RowsTuple):
                    each = Rows(value.key, leading=True, counted=value.counted)
                self._bind(node, part, each)
        elif isinstance(target, ast.Subscript):
            self._store(node, target)
        else:
            raise self._refused("state", node, f"a write to {ast.unparse(target)}")

    def _store(self, node: ast.stmt, target: ast.Subscript) -> None:
        self.values.write(node, target)
        parts = [self.values.of_this_loop(self.values.value(part)) for part in index_parts(target)]
        base = self.values.value(target.value)
        nothing = any(isinstance(part, Rows | Selection) for part in parts)
        if not nothing and not isinstance(base, Fresh) and not _own_rows(base):
            raise self._refused(
                "write",
                node,
                f"a write to {ast.unparse(target)}",
                "writes to what this expert's tokens select",
            )

    def _add(self, node: ast.AugAssign) -> list[ast.stmt]:
        value = self.values.value(node.value)
        if isinstance(node.target, ast.Subscript):
            self._store(node, node.target)
            return [self.values.rewritten(node)]
        if not isinstance(node.target, ast.Name):
            raise self._refused("state", node, f"a write to {ast.unparse(node.target)}")
        name = node.target.id
        held = self.values.name(name)
        if isinstance(held, Cursor) and not held.end and isinstance(value, Count):
            self.values.names[name] = Cursor(value.key, end=True)
            self._dropped.add(name)
            return []
        if isinstance(held, Same) or not (isinstance(held, Fresh) or _own_rows(held)):
            raise self._refused(
                "write",
                node,
                f"a write to {name} in every turn",
                "writes to what this expert's tokens select",
            )
        return [self.values.rewritten(node)]

    def _expression(self, node: ast.Expr) -> list[ast.stmt]:
        if isinstance(node.value, ast.Constant):
            return []
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "append"
            and isinstance(call.func.value, ast.Name)
            and len(call.args) == 1
        ):
            rows = self.values.as_rows(self.values.value(call.args[0]))
            made = self.values.name(call.func.value.id)
            if not isinstance(made, EmptyList) or not (isinstance(rows, Rows) and rows.leading):
                raise self._refused(
                    "write",
                    node,
                    f"{ast.unparse(call)} in every turn",
                    "rows of this expert, appended to a list that is empty before the loop",
                )
            self.lists.add(call.func.value.id)
            return [self.values.rewritten(node)]
        self.values.value(call)
        return [self.values.rewritten(node)]

    def _if(self, node: ast.If) -> list[ast.stmt]:
        test = self.values.truth(node.test)
        before = dict(self.values.names)
        other = not isinstance(test, Truth)
        self.values.tests += not other
        self.values.conditional += other
        body = self._block(node.body)
        after_body, self.values.names = self.values.names, dict(before)
        orelse = self._block(node.orelse)
        self.values.conditional -= other
        after_else = self.values.names
        body_ends, else_ends = _ends(node.body), _ends(node.orelse)
        if isinstance(test, Truth):
            if test.when_empty:
                ends, empty, tokens, lifted = body_ends, after_body, after_else, orelse
            else:
                ends, empty, tokens, lifted = else_ends, after_else, after_body, body
            self.values.names = dict(tokens) if ends else _merged(empty, tokens)
            return lifted
        if body_ends or else_ends:
            self.values.conditional += 1  # for the rest of the turn
            self.values.names = dict(after_else if body_ends else after_body)
        else:
            self.values.names = _merged(after_body, after_else)
        condition = self.values.rewritten_expression(node.test)
        if not body:
            body = [ast.copy_location(ast.Pass(), node)]
        return [ast.copy_location(ast.If(test=condition, body=body, orelse=orelse), node)]

    def _allowed_context(self, node: ast.expr) -> bool:
        function = node.func if isinstance(node, ast.Call) else node
        return isinstance(function, ast.Attribute) and function.attr in _CONTEXTS

    def _refused(
        self, check: str, node: ast.AST, got: str, want: str = "turns without such effects"
    ) -> Refusal:
        return Refusal(check, node, got, want)


def _own_rows(value: Value) -> bool:
    """Whether a write to a value reaches nothing else, or has no elements to write."""
    return isinstance(value, Rows | RowsTuple)


def _ends(statements: list[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], ast.Continue)


def _merged(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    return {
        name: one[name] if one[name] == other[name] else Value() for name in one if name in other
    }


def _bound_in(body: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _title(node: ast.stmt) -> str:
    return f"a {type(node).__name__.lower()} statement"
