"""The source of a method as a tree, and a function out of a changed tree.

Both keep to the file the method comes from: the tree has its line numbers, and the new function its
file name, globals, closure, defaults and decorators, so that tracebacks, reports and dynamo's
guards read as they do for the method itself.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from moe_graph.provenance import short_path

_FACTORY = "_moe_graph_factory"


@dataclass(frozen=True)
class Source:
    """A Python function and its source.

    Attributes:
        function: the function, without its decorators.
        tree: its definition.
        file: where it is written.
    """

    function: FunctionType
    tree: ast.FunctionDef
    file: str

    @functools.cached_property
    def has_loop(self) -> bool:
        """Whether there is a ``for`` statement in it."""
        return any(isinstance(node, ast.For) for node in ast.walk(self.tree))

    def place(self, node: ast.AST) -> str:
        """Return ``file:line`` of a node."""
        return f"{short_path(self.file)}:{getattr(node, 'lineno', self.tree.lineno)}"

    def local_names(self) -> set[str]:
        """Return the names that the function binds, its arguments among them."""
        arguments = self.tree.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        others = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
        stored = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return {argument.arg for argument in [*named, *others]} | {
            node.id for node in stored if isinstance(node.ctx, ast.Store)
        }

    def outer(self, name: str) -> Any:
        """Return what a name that the function does not bind stands for; raise KeyError."""
        function = self.function
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in closure:
            return closure[name].cell_contents
        if name in function.__globals__:
            return function.__globals__[name]
        builtins = function.__globals__["__builtins__"]
        return (builtins if isinstance(builtins, dict) else vars(builtins))[name]


@functools.cache
def source_of(function: Callable[..., Any]) -> Source | None:
    """Return the source of a Python function, None where there is none to be had."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return None
    try:
        lines, first = inspect.getsourcelines(inner)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - 1)
    return Source(inner, definition, inner.__code__.co_filename)


def function_from(source: Source, tree: ast.FunctionDef) -> Callable[..., Any]:
    """Return the function that `tree`, a changed copy of ``source.tree``, defines.

    Raises:
        Exception: a decorator cannot be applied again.
    """
    inner = source.function
    free = inner.__code__.co_freevars
    factory = ast.FunctionDef(
        name=_FACTORY,
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=name) for name in free],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        ),
        body=[tree, ast.Return(value=ast.Name(id=tree.name, ctx=ast.Load()))],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module(body=[factory], type_ignores=[]))
    namespace: dict[str, Any] = {}
    exec(compile(module, source.file, "exec"), inner.__globals__, namespace)
    made = namespace[_FACTORY](*(cell.cell_contents for cell in inner.__closure__ or ()))
    innermost = inspect.unwrap(made)
    innermost.__defaults__, innermost.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
    innermost.__module__, innermost.__qualname__ = inner.__module__, inner.__qualname__
    return made
