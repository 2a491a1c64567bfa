"""One name and one argument list for a call, whether written as a function or as a method."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import ModuleType

from moe_graph.frontends.purity import MISSING, Reading

_SAME_OP = {
    "greater": "gt",
    "not_equal": "ne",
    "eq_": "eq",
    "arg_sort": "argsort",
    "floor_divide": "div",
    "divide": "div",
    "argwhere": "nonzero",
    "nelement": "numel",
}
_COMPARISONS = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Lt: "lt",
    ast.LtE: "le",
}


@dataclass(frozen=True)
class Call:
    """A call of a torch function or of a method, or a comparison.

    Attributes:
        name: of the op.
        args: positional arguments, the tensor first.
        kwargs: keyword arguments.
        node: the call itself.
    """

    name: str
    args: list[ast.expr]
    kwargs: dict[str, ast.expr]
    node: ast.expr

    def argument(self, position: int, keyword: str) -> ast.expr | None:
        """Return an argument by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(keyword)

    def number(self, position: int, keyword: str) -> int | None:
        """Return an argument that is written as a whole number."""
        return whole_number(self.argument(position, keyword))

    def numbers(self, position: int, keyword: str) -> list[int] | None:
        """Return an argument, or all from there on, as whole numbers."""
        node = self.argument(position, keyword)
        if isinstance(node, ast.Tuple | ast.List):
            parts = node.elts
        elif node is not None and node in self.args:
            parts = self.args[position:]
        else:
            parts = [node] if node is not None else []
        numbers = [whole_number(part) for part in parts]
        return None if None in numbers or not numbers else [n for n in numbers if n is not None]


def spelled(node: ast.expr, reading: Reading) -> Call | None:
    """Return the call of a torch function, of a method, or the comparison that a node is."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        name = _COMPARISONS.get(type(node.ops[0]))
        return Call(name, [node.left, node.comparators[0]], {}, node) if name else None
    if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    kwargs = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    function = node.func
    if isinstance(function, ast.Attribute):
        name = _SAME_OP.get(function.attr, function.attr)
        if isinstance(reading.static(function.value), ModuleType):
            args = list(node.args)
            if not args and "input" in kwargs:
                args = [kwargs.pop("input")]
            return Call(name, args, kwargs, node)
        return Call(name, [function.value, *node.args], kwargs, node)
    if isinstance(function, ast.Name):
        called = reading.static(function)
        name = getattr(called, "__name__", function.id) if called is not MISSING else function.id
        return Call(_SAME_OP.get(name, name), list(node.args), kwargs, node)
    return None


def whole_number(node: ast.expr | None) -> int | None:
    """Return the whole number that is written, -1 among them."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = whole_number(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def is_full_slice(node: ast.expr) -> bool:
    """Whether an index takes a whole axis, or all of the remaining ones."""
    if isinstance(node, ast.Constant):
        return node.value is Ellipsis
    return isinstance(node, ast.Slice) and not (node.lower or node.upper or node.step)


def index_parts(node: ast.Subscript) -> list[ast.expr]:
    """Return the parts of an index."""
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
