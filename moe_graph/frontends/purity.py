"""Does a call do anything but return a value? Read off the source of what is called.

An expert that no token chose is run on an empty tensor once a loop is lifted. That is without
consequence only if nothing that is called keeps state, prints, or draws random numbers. What cannot
be read is taken to do so. Dropout draws nothing for an empty tensor.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from moe_graph.frontends.source import Source, source_of

MISSING = object()

_BUILTINS = frozenset(
    {"abs", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int", "isinstance", "len"}
    | {"list", "max", "min", "range", "repr", "reversed", "round", "slice", "sorted", "str", "sum"}
    | {"tuple", "type", "zip"}
)
_PACKAGES = ("torch", "einops", "math", "operator")
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson", "seed", "set_", "rng")
_METHODS_WITH_EFFECTS = frozenset({"backward", "register_hook", "retain_grad", "share_memory_"})
_STATEFUL = (nn.modules.batchnorm._NormBase,)
_LIST_METHODS = frozenset({"append", "extend", "insert"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Reading:
    """A function under reading, as a method of a module or alone.

    Attributes:
        source: the function.
        module: what its first argument stands for, None for a plain function.
        seen: functions that were read before, or are being read.
    """

    source: Source
    module: nn.Module | None
    seen: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        arguments = [*self.source.tree.args.posonlyargs, *self.source.tree.args.args]
        self.locals = self.source.local_names()
        self.self_name = arguments[0].arg if arguments and self.module is not None else None
        self._definitions = _bound_once(self.source.tree)

    def static(self, node: ast.expr) -> Any:
        """Return the object that an expression stands for whatever the input, or ``MISSING``."""
        if isinstance(node, ast.Name):
            if node.id == self.self_name:
                return self.module
            if node.id in self.locals:
                made = self.definition(node.id)
                return MISSING if made is None else self.static(made)
            try:
                return self.source.outer(node.id)
            except KeyError:
                return MISSING
        if isinstance(node, ast.Attribute):
            owner = self.static(node.value)
            known = isinstance(owner, ModuleType | nn.Module | type) or _is_settings(owner)
            return getattr(owner, node.attr, MISSING) if known else MISSING
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple):
            parts = [self.static(part) for part in node.elts]
            return MISSING if MISSING in parts else tuple(parts)
        if isinstance(node, ast.UnaryOp | ast.BinOp | ast.Call):
            return self._static_result(node)
        return MISSING

    def definition(self, name: str) -> ast.expr | None:
        """Return what a local name is bound to, None unless it is bound once, by itself."""
        return self._definitions.get(name)

    def _static_result(self, node: ast.UnaryOp | ast.BinOp | ast.Call) -> Any:
        if isinstance(node, ast.UnaryOp):
            number = self.static(node.operand)
            minus = isinstance(node.op, ast.USub) and isinstance(number, int)
            return -number if minus else MISSING
        if isinstance(node, ast.BinOp):
            left, right = self.static(node.left), self.static(node.right)
            operator = _ARITHMETIC.get(type(node.op))
            numbers = isinstance(left, int) and isinstance(right, int) and right != 0
            return operator(left, right) if operator and numbers else MISSING
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            owner = self.static(node.args[0])
            return len(owner) if isinstance(owner, Sized) else MISSING
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("view", "reshape"):
            tensor = self.static(node.func.value)
            sizes = [self.static(arg) for arg in node.args]
            if isinstance(tensor, torch.Tensor) and MISSING not in sizes:
                return tensor.detach().reshape(*sizes)
        return MISSING

    def effect_of_body(self) -> str:
        """Return the first effect of the whole function, empty if there is none."""
        for statement in self.source.tree.body:
            for node in ast.walk(statement):
                effect = self._effect_of(node)
                if effect:
                    return f"{effect} ({self.source.place(node)})"
        return ""

    def effect_of_call(self, call: ast.Call) -> str:
        """Return what a call does besides returning a value, empty if nothing."""
        function = call.func
        if isinstance(function, ast.Attribute) and self.static(function) is MISSING:
            return self._effect_of_method(function)
        called = self.static(function)
        if isinstance(function, ast.Subscript):  # one of a list of modules
            called = self.static(function.value)
        if called is MISSING:
            return f"a call of {ast.unparse(function)}, which cannot be read"
        return self.effect_of_object(called, function)

    def effect_of_object(self, called: Any, node: ast.expr) -> str:
        """Return what calling an object does besides returning a value."""
        name = getattr(called, "__name__", ast.unparse(node))
        if isinstance(called, nn.Module):
            return effect_of_module(called, self.seen)
        if getattr(builtins, name, None) is called:
            return "" if name in _BUILTINS else f"a call of {name}"
        if _of_package(called, self.static(_root(node))):
            return _effect_of_torch(name)
        if isinstance(called, MethodType) and isinstance(called.__self__, nn.Module):
            return effect_of_function(called.__func__, called.__self__, self.seen)
        if isinstance(called, FunctionType):
            return effect_of_function(called, None, self.seen)
        return f"a call of {ast.unparse(node)}, which cannot be read"

    def _effect_of_method(self, function: ast.Attribute) -> str:
        root = _root(function)
        name = function.attr
        own = isinstance(root, ast.Name) and root.id == self.self_name
        if name in _LIST_METHODS and isinstance(function.value, ast.Name):
            return ""
        if own and not isinstance(function.value, ast.Subscript | ast.Call):
            held = self.static(function.value)
            if not isinstance(held, torch.Tensor):
                return f"a call of {ast.unparse(function)}, which cannot be read"
        if name in _METHODS_WITH_EFFECTS or (name.endswith("_") and not name.endswith("__")):
            return f"a write in place by {name}"
        if not hasattr(torch.Tensor, name) and name not in _TEXT_AND_MAPPING:
            return f"a call of {ast.unparse(function)}, which cannot be read"
        return _effect_of_torch(name)

    def _effect_of(self, node: ast.AST) -> str:
        if isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.Delete):
            return f"a {type(node).__name__.lower()} statement"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                    if isinstance(part, ast.Attribute | ast.Subscript):
                        return f"a write to {ast.unparse(part)}"
        if isinstance(node, ast.AugAssign) and not self._is_own(node.target):
            return f"a write to {ast.unparse(node.target)}"
        if isinstance(node, ast.Call):
            return self.effect_of_call(node)
        return ""

    def _is_own(self, target: ast.expr) -> bool:
        """Whether a name stands for results that the function has just made."""
        made = [
            node.value
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == ast.unparse(target) for t in node.targets)
        ]
        return bool(made) and all(
            isinstance(value, ast.BinOp | ast.Constant)
            or (isinstance(value, ast.Call) and isinstance(self.static(value.func), nn.Module))
            for value in made
        )


def _bound_once(tree: ast.FunctionDef) -> dict[str, ast.expr]:
    times = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and times[node.targets[0].id] == 1
        and node.targets[0].id not in arguments
    }


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_TEXT_AND_MAPPING = frozenset({"format", "join", "get", "items", "keys", "values", "pop"})


def effect_of_module(module: nn.Module, seen: set[Any]) -> str:
    """Return what calling a module does besides returning a value, empty if nothing."""
    for name, part in module.named_modules():
        label = f"{type(module).__name__}{'.' + name if name else ''}"
        if any(getattr(part, hooks, None) for hooks in _HOOKS):
            return f"a hook on {label}"
        if isinstance(part, _STATEFUL) and getattr(part, "track_running_stats", True):
            return f"running statistics of {label}"
        if not type(part).forward.__module__.startswith("torch."):
            effect = effect_of_function(type(part).forward, part, seen)
            if effect:
                return effect
    return ""


def effect_of_function(
    function: Callable[..., Any], module: nn.Module | None, seen: set[Any]
) -> str:
    """Return what calling a function, or a method of a module, does besides returning a value."""
    inner = inspect.unwrap(function)
    if (inner, module) in seen:
        return ""
    seen.add((inner, module))
    source = source_of(function)
    if source is None:
        return f"a call of {getattr(function, '__qualname__', function)}, which cannot be read"
    return Reading(source, module, seen).effect_of_body()


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _of_package(called: Any, root: Any) -> bool:
    names = [getattr(called, "__module__", None)]
    if isinstance(root, ModuleType):
        names.append(root.__name__)
    return any(str(name).partition(".")[0] in _PACKAGES for name in names if name)


def _effect_of_torch(name: str) -> str:
    if name.endswith("_") and not name.endswith("__"):
        return f"a write in place by {name}"
    if any(name.startswith(word) or word in name.split("_") for word in _RANDOM):
        return f"random numbers drawn by {name}"
    return ""


def _is_settings(owner: Any) -> bool:
    """Whether attributes of an object can be read as settings of a model: numbers and names."""
    return type(owner).__name__.endswith(("Config", "Args", "ModelArgs", "Namespace", "Arguments"))
