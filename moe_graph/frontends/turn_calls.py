"""Calls in a turn: what they return for no tokens, what they write, and whether they do more."""

from __future__ import annotations

import ast

from torch import nn

from moe_graph.frontends.purity import MISSING
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.rows import distinct
from moe_graph.frontends.spelling import Call, spelled, whole_number
from moe_graph.frontends.turn_tests import Tests
from moe_graph.frontends.values import (
    Count,
    Fresh,
    OfModules,
    OneOf,
    Rows,
    RowsTuple,
    Same,
    Selection,
    Static,
    Truth,
    Value,
)

_SELECTION_KEEPS = frozenset(
    {"view", "reshape", "flatten", "squeeze", "unsqueeze", "bool", "int", "long", "float", "to"}
    | {"permute", "t", "transpose", "contiguous", "any", "amax", "ravel"}
)
_CASTS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "long", "int"}
)
_ROW_BY_ROW = frozenset(
    {"linear", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "dropout", "clamp", "exp"}
    | {"mul", "add", "sub", "div", "matmul", "mm", "pow", "square", "neg", "sqrt", "clone"}
)
_ROWS_KEEP = frozenset(
    {"view", "reshape", "flatten", "squeeze", "unsqueeze", "t", "transpose", "permute", "expand"}
    | {"repeat", "bmm", "repeat_interleave", "detach", "softmax"}
)
_ROWS_SPLIT = frozenset({"chunk", "split", "unbind", "tensor_split"})
_WRITES_AT = {
    "index_add": 2,
    "scatter_add": 2,
    "scatter_reduce": 2,
    "index_copy": 2,
    "index_put": 1,
    "masked_fill": 1,
    "masked_scatter": 1,
}
"""Ops that write where an index says, and the place of the index among the arguments."""


class Calls(Tests):
    """Rules for calls."""

    def _of_call(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.Call)
        expert = self._expert(node)
        if expert is not None:
            return expert
        squeezed = self._squeezed(node)
        if squeezed is not None:
            return squeezed
        module = self._module_called(node)
        if module is not None:
            return module
        call = spelled(node, self._reading)
        values = [self._argument(arg) for arg in node.args]
        for keyword in node.keywords:
            self.value(keyword.value)
        if call is None:
            self._must_be_pure(node)
            return Value()
        if isinstance(node.func, ast.Attribute) and len(call.args) > len(node.args):
            values.insert(0, self.value(node.func.value))
        if call.name == "eq" and len(call.args) == 2:
            return self._compared(call)
        written = self._written(node, call, values)
        if written is not None:
            return written
        self._must_be_pure(node)
        return self._result(call, values)

    def _argument(self, node: ast.expr) -> Value:
        return Value() if isinstance(node, ast.Starred) else self.value(node)

    def _squeezed(self, node: ast.Call) -> Value | None:
        """``x[e].squeeze(0)``, with the expert as a tensor ``[1]``, is ``x[e]`` with a number."""
        function = node.func
        if not isinstance(function, ast.Attribute) or function.attr != "squeeze":
            return None
        if len(node.args) != 1 or whole_number(node.args[0]) != 0:
            return None
        value = self.value(function.value)
        row = self._instead.get(id(function.value))
        if isinstance(row, ast.Subscript) and isinstance(row.slice, ast.Slice):
            self._instead[id(node)] = function.value
            del self._instead[id(function.value)]
            return value
        return None

    def _module_called(self, node: ast.Call) -> Value | None:
        function = node.func
        if isinstance(function, ast.Attribute | ast.Name | ast.Subscript | ast.Call):
            held = self._callee(function)
        else:
            return None
        if held is None:
            return None
        values = [self._argument(arg) for arg in node.args]
        for keyword in node.keywords:
            self.value(keyword.value)
        held = distinct(held)
        for module in held:
            effect = self._reading.effect_of_object(module, function)
            if effect:
                raise Refusal(
                    "pure",
                    node,
                    effect,
                    "experts that do nothing for no tokens",
                )
        rows = next((value for value in values if isinstance(value, Rows)), None)
        return OfModules(rows.key, tuple(held)) if rows is not None and rows.leading else Value()

    def _callee(self, function: ast.expr) -> list[nn.Module] | None:
        if isinstance(function, ast.Call):
            named = isinstance(function.func, ast.Name) and function.func.id == "getattr"
            owner = self._reading.static(function.args[0]) if named and function.args else MISSING
            if isinstance(owner, nn.Module) and len(function.args) == 2:
                self.value(function.args[1])
                return list(owner.children())
            return None
        thing = self._reading.static(function)
        if isinstance(thing, nn.Module):
            return [thing]
        if isinstance(function, ast.Attribute):
            return None
        value = self.value(function)
        if isinstance(value, OneOf) and all(isinstance(one, nn.Module) for one in value.things):
            return list(value.things)
        if isinstance(value, Static) and isinstance(value.thing, nn.Module):
            return [value.thing]
        return None

    def _written(self, node: ast.Call, call: Call, values: list[Value]) -> Value | None:
        """A write where an index says; nothing is written if this expert's tokens are the index."""
        name = call.name.removesuffix("_")
        place = _WRITES_AT.get(name)
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        if place is None:
            if in_place and values and (isinstance(values[0], Fresh) or _rows(values[0])):
                return values[0]
            if in_place:
                raise _every_turn(node, call)
            return None
        index = values[place] if place < len(values) else self._keyword_value(call, "index")
        index = self.of_this_loop(index)
        if isinstance(call.argument(place, "index"), ast.Tuple):
            parts = call.argument(place, "index").elts  # type: ignore[union-attr]
            index = next((v for v in map(self.value, parts) if _rows(v)), Value())
        nothing = _rows(index) or isinstance(index, Selection)
        base = values[0] if values else Value()
        if in_place and not nothing and not isinstance(base, Fresh) and not _rows(base):
            raise _every_turn(node, call)
        if in_place:
            self.write(node, call.args[0])
        if nothing and isinstance(call.args[0], ast.Name):
            name = call.args[0].id
            return Same(name) if name in self.bound or in_place else Fresh()
        return Value() if in_place else Fresh()

    def _keyword_value(self, call: Call, name: str) -> Value:
        node = call.kwargs.get(name)
        return self.value(node) if node is not None else Value()

    def _must_be_pure(self, node: ast.Call) -> None:
        effect = self._reading.effect_of_call(node)
        if effect:
            raise Refusal("pure", node, effect, "calls that only return a value")

    def _result(self, call: Call, values: list[Value]) -> Value:
        first = self.of_this_loop(values[0]) if values else Value()
        if isinstance(first, Selection):
            return self._of_selection(call, first)
        if call.name in ("item", "bool", "int", "cpu") and isinstance(first, Count | Truth):
            return first
        if call.name == "len" or (call.name == "size" and call.number(1, "dim") == 0):
            return self._size(first, 0)
        if isinstance(first, OfModules) and call.name in _CASTS | _ROW_BY_ROW:
            first = self.as_rows(first)
        if isinstance(first, Rows):
            return self._of_rows(call, first)
        if isinstance(first, RowsTuple) and call.name in ("tuple", "list"):
            return first
        if call.name in ("index_select", "gather") and len(values) == 3 and _rows(values[2]):
            first_axis = call.number(1, "dim") == 0
            return Rows(getattr(values[2], "key", ()), leading=first_axis, fresh=True)
        return Value()

    def _of_selection(self, call: Call, chosen: Selection) -> Value:
        whole = len(call.args) == 1 and not {"dim", "axis"} & set(call.kwargs)
        if call.name == "any" and whole:
            return Truth(chosen.key, when_empty=False)
        if call.name in ("sum", "count_nonzero") and whole:
            return Value() if chosen.signed and call.name == "sum" else Count(chosen.key)
        if call.name == "where" and whole:
            return RowsTuple(chosen.key, counted=True)
        if call.name == "nonzero":
            as_tuple = call.kwargs.get("as_tuple")
            table = isinstance(as_tuple, ast.Constant) and as_tuple.value is True
            if table:
                return RowsTuple(chosen.key, counted=True)
            return Rows(chosen.key, leading=True, counted=True, fresh=True)
        return chosen if call.name in _SELECTION_KEEPS else Value()

    def _of_rows(self, call: Call, rows: Rows) -> Value:
        if call.name == "numel":
            return Count(rows.key) if rows.counted else Value()
        if call.name in _ROWS_SPLIT:
            return RowsTuple(rows.key)
        if call.name in ("view", "reshape", "flatten", "squeeze"):
            sizes = call.numbers(1, "shape")
            all_rows = call.name in ("flatten", "squeeze") or (
                len(call.args) > 1 and whole_number(call.args[1]) == -1
            )
            last = call.name != "squeeze" or (sizes is not None and sizes != [0])
            leading = rows.leading and all_rows and last
            return Rows(rows.key, leading=leading, counted=leading and rows.counted)
        if call.name == "unsqueeze" and call.number(1, "dim") in (-1, 1, 2):
            return Rows(rows.key, leading=rows.leading, counted=rows.counted)
        if call.name in _CASTS:
            return Rows(rows.key, leading=rows.leading, counted=rows.counted)
        if call.name in _ROW_BY_ROW:
            return Rows(rows.key, leading=rows.leading, fresh=True)
        return Rows(rows.key) if call.name in _ROWS_KEEP else Value()


def _every_turn(node: ast.Call, call: Call) -> Refusal:
    written = ast.unparse(call.args[0])
    want = "writes to what this expert's tokens select"
    return Refusal("write", node, f"a write to {written} in every turn", want)


def _rows(value: Value) -> bool:
    return isinstance(value, Rows | RowsTuple)
