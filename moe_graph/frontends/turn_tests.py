"""Operators in a turn: tests for tokens, and where the rows of the expert begin and end."""

from __future__ import annotations

import ast

from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.spelling import Call, spelled, whole_number
from moe_graph.frontends.turn_base import TurnBase
from moe_graph.frontends.values import (
    Count,
    Cursor,
    Fresh,
    Named,
    Rows,
    Selection,
    Truth,
    Value,
)


class Tests(TurnBase):
    """Rules for operators."""

    def _of_binop(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.BinOp)
        left, right = (self.as_rows(self.value(side)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Add) and isinstance(left, Cursor) and isinstance(right, Count):
            return Cursor(right.key, end=True) if not left.end else Value()
        rows = [side for side in (left, right) if isinstance(side, Rows)]
        if rows:
            leading = (
                isinstance(left, Rows) and left.leading
                if isinstance(node.op, ast.MatMult)
                else any(side.leading for side in rows)
            )
            return Rows(rows[0].key, leading=leading, fresh=True)
        return Fresh()

    def _of_boolop(self, node: ast.expr) -> Value:
        """Tests for tokens among others become what they are for an expert with tokens."""
        assert isinstance(node, ast.BoolOp)
        for part in node.values:
            test = self.truth(part)
            if isinstance(test, Truth):
                self.tests += 1
                self._instead[id(part)] = ast.Constant(value=not test.when_empty)
        return Value()

    def _of_unaryop(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.UnaryOp)
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Count):
                return Truth(value.key, when_empty=True)
            if isinstance(value, Truth):
                return Truth(value.key, not value.when_empty)
        return value if isinstance(value, Rows) else Value()

    def _of_ifexp(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.IfExp)
        # ``0 if e == 0 else ends[e - 1]``: where the rows of this expert begin.
        test = spelled(node.test, self._reading)
        first = (
            test is not None
            and test.name == "eq"
            and self._expert(test.args[0]) is not None
            and whole_number(test.args[1]) == 0
            and whole_number(node.body) == 0
        )
        body, orelse = self.value(node.body), self.value(node.orelse)
        if first and isinstance(orelse, Cursor) and not orelse.end:
            return orelse
        value = self.truth(node.test)
        if isinstance(value, Truth):
            raise Refusal("test", node, ast.unparse(node), "tests for tokens as statements")
        return body if body == orelse else Value()

    def _of_compare(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.Compare)
        call = spelled(node, self._reading)
        if call is None:
            for part in [node.left, *node.comparators]:
                self.value(part)
            return Value()
        return self._compared(call)

    def _compared(self, call: Call) -> Value:
        left, right = call.args[0], call.args[1]
        experts = [self._expert(left), self._expert(right)]
        if any(experts):
            other = self.value(right if experts[0] else left)
            if call.name == "eq" and isinstance(other, Named):
                form = next(expert.form for expert in experts if expert)
                return Selection(other.key) if form != "row" else Value()
            self.compared = True
            return Value()
        one, two = self.value(left), self.value(right)
        if isinstance(one, Cursor) and isinstance(two, Cursor) and one.end != two.end:
            key = one.key if one.end else two.key
            self.key = self.key or key
            empty = {"eq": True, "ne": False}.get(call.name)
            return Value() if empty is None or key != self.key else Truth(key, empty)
        name, number = call.name, whole_number(right)
        if isinstance(two, Count):
            flipped = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
            name, number, one = flipped.get(name, name), whole_number(left), two
        if not isinstance(one, Count):
            return Value()
        empty = {
            ("eq", 0): True,
            ("ne", 0): False,
            ("gt", 0): False,
            ("le", 0): True,
            ("ge", 1): False,
            ("lt", 1): True,
        }.get((name, number if number is not None else -1))
        if empty is None:
            raise Refusal("test", call.node, ast.unparse(call.node), "a test for any tokens")
        return Truth(one.key, empty)

    def _of_joinedstr(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.JoinedStr)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                expert = self._expert(part.value)
                if expert is None or expert.form == "row":
                    self.value(part.value)
        return Value()
