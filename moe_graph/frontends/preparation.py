"""``prepare``: lifts the expert loops of a model that dynamo cannot trace.

Each module with such a loop gets a class of its own, derived from its class, in which the method
with the loop has two bodies:

::

    def forward(self, *args, **kwargs):
        if capturing_for_moe_graph():           # dynamo traces for moe_graph
            return lifted(self, *args, **kwargs)
        return original(self, *args, **kwargs)  # eagerly, and for every other backend

so that outside of a compilation by moe_graph the model does, bit for bit, what it did. The class
itself, and other models of it, are not touched.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from moe_graph.frontends.breaks import FORM
from moe_graph.frontends.loops import lift_loops
from moe_graph.frontends.purity import Reading
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.source import Source, function_from, source_of
from moe_graph.frontends.tracing import capturing_for_moe_graph
from moe_graph.report import LayerReport, Reason, Report, Status

logger = logging.getLogger("moe_graph")

Model = TypeVar("Model", bound=nn.Module)

_ORIGINAL = "_moe_graph_original"
_trees: dict[tuple[Callable[..., Any], str], ast.FunctionDef] = {}
_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def prepare(model: Model) -> Model:
    """Lift the expert loops of a model that dynamo cannot trace, for compilation by moe_graph.

    A loop over the experts that some token chose, a test for tokens within a loop, and counts that
    are read on the host break a graph. Where it is proved from the source that an expert without
    tokens has no effect, the loop is traced without them. What was lifted, and which condition
    failed for a loop that was not, is logged and in :func:`preparation`.

    Args:
        model: any module. It is changed in place: modules with lifted loops get a derived class of
            the same name. Calling it again looks at the loops again.

    Returns:
        `model`. Its results outside of a compilation by moe_graph are those it had.
    """
    report = Report()
    for path, module in model.named_modules():
        _unprepare_module(module)
        report.layers += _prepare_module(path, module)
    _reports[model] = report
    for layer in report.layers:
        if layer.status == "rewritten":
            logger.info("expert loop of %s lifted (%s)", layer.path or "the model", layer.source)
        else:
            logger.warning(
                "expert loop of %s left as it is: %s", layer.path or "the model", layer.reasons[0]
            )
    return model


def unprepare(model: Model) -> Model:
    """Undo :func:`prepare`.

    Returns:
        `model`, with the classes its modules had.
    """
    for module in model.modules():
        _unprepare_module(module)
    _reports.pop(model, None)
    return model


def preparation(model: nn.Module) -> Report:
    """Return what :func:`prepare` found in `model`, a loop as one layer.

    A lifted loop is ``rewritten``; one that is ``kept`` has the condition that failed. Loops that
    dynamo can trace are not in it. Empty for a model that was not prepared.
    """
    return _reports.get(model, Report())


def _prepare_module(path: str, module: nn.Module) -> list[LayerReport]:
    reports: list[LayerReport] = []
    lifted: dict[str, str] = {}
    for name, function in _methods(type(module)):
        source = source_of(function)
        if source is None or not source.has_loop:
            continue
        if _is_experts_registry(function):
            continue
        found = lift_loops(Reading(source, module))
        obstacle = _obstacle(name, function, source, module)
        if obstacle is not None:
            found.refused += [(loop, obstacle) for loop in found.loops]
            found.loops = []
        refused = [(loop, _reason(source, refusal)) for loop, refusal in found.refused]
        reports += [_report(path, source, loop, []) for loop in found.loops]
        reports += [_report(path, source, loop, [reason]) for loop, reason in refused]
        if found.loops:
            lifted[name] = ast.unparse(found.tree)
            _trees.setdefault((function, lifted[name]), found.tree)
    if lifted:
        module.__class__ = _derived(type(module), tuple(lifted.items()))  # type: ignore[arg-type]
    return reports


def _is_experts_registry(function: FunctionType) -> bool:
    """Whether transformers looks up an implementation where its class has a loop."""
    return function.__globals__.get("__name__") == "transformers.integrations.moe"


def _obstacle(
    name: str, function: FunctionType, source: Source, module: nn.Module
) -> Refusal | None:
    """Return what would keep a lifted method from being called, or from doing what it did."""
    if name in vars(module):
        return Refusal(
            "wrapped",
            source.tree,
            f"a {name} that was set on the module itself",
            "the method of its class",
            "prepare the model before it is wrapped",
        )
    if inspect.unwrap(function) is not function and not source.tree.decorator_list:
        return Refusal(
            "wrapped",
            source.tree,
            f"{name} wrapped by {function.__globals__.get('__name__')}",
            "the method as it is written",
        )
    return None


def _report(path: str, source: Source, loop: ast.For, reasons: list[Reason]) -> LayerReport:
    status: Status = "kept" if reasons else "rewritten"
    return LayerReport(path, source.place(loop), status, form=FORM, reasons=reasons)


def _reason(source: Source, refusal: Refusal) -> Reason:
    return Reason(
        refusal.check,
        ast.unparse(refusal.node).partition("\n")[0],
        source.place(refusal.node),
        refusal.got,
        refusal.want,
        refusal.hint,
    )


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of a class that are written outside of torch, each name once."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch" or not issubclass(base, nn.Module):
            continue
        for name, function in vars(base).items():
            if isinstance(function, FunctionType) and name not in seen and name != "__init__":
                yield name, function
            seen.add(name)


@functools.cache
def _with_two_bodies(original: Callable[..., Any], written: str) -> Callable[..., Any]:
    source = source_of(original)
    assert source is not None
    lifted = function_from(source, _trees[original, written])

    @functools.wraps(original)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if capturing_for_moe_graph():
            return lifted(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return either


@functools.cache
def _derived(cls: type[nn.Module], lifted: tuple[tuple[str, str], ...]) -> type[nn.Module]:
    """Return a class derived from `cls`, with lifted methods: name and text of each."""
    methods = {name: _with_two_bodies(getattr(cls, name), written) for name, written in lifted}
    namespace: dict[str, Any] = {
        **methods,
        _ORIGINAL: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "__deepcopy__": getattr(cls, "__deepcopy__", _copied),
    }
    derived: type[nn.Module] = type(cls)(cls.__name__, (cls,), namespace)  # type: ignore[misc]
    return derived


def _unprepare_module(module: nn.Module) -> None:
    original = vars(type(module)).get(_ORIGINAL)
    if original is not None:
        module.__class__ = original


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module with its lifted loops."""
    made = _remade(type(module))
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(vars(module), memo))
    return made


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Pickle a module as one of its own class: who loads it need not know of moe_graph."""
    made = super(type(module), module).__reduce_ex__(protocol)
    original = getattr(type(module), _ORIGINAL)
    return (_remade, (original,), *made[2:])


def _remade(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
