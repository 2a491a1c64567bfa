"""Which ops of an ATen graph TorchAir cannot lower, found before any conversion is tried.

TorchAir has no fallback: one op without a working converter stops the whole compile, and it names
only the first. :func:`missing_lowerings` lists them all, with counts and source lines. A converter
that exists may still refuse certain arguments; only a conversion shows that.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from moe_graph.provenance import describe

_BUILT_IN_NAMESPACES = ("aten", "prims", "prim")


@dataclass(frozen=True)
class MissingLowering:
    """One op of a graph that has no working converter.

    Attributes:
        op: name of the overload, for example ``"aten.histc.default"``.
        count: how many nodes of the graph call it.
        why: ``"no converter"`` or ``"converter refuses every call"``.
        where: module path and source line of the first such node, empty when unknown.
    """

    op: str
    count: int
    why: str
    where: str

    def __str__(self) -> str:
        place = f", first in {self.where}" if self.where else ""
        return f"{self.op} x{self.count}: {self.why}{place}"


class LoweringError(RuntimeError):
    """A graph holds ops that TorchAir cannot lower.

    Attributes:
        missing: one entry per op.
    """

    def __init__(self, missing: Iterable[MissingLowering], cause: str = "") -> None:
        self.missing = list(missing)
        lines = "\n".join(f"  - {entry}" for entry in self.missing)
        tail = f"\nTorchAir said: {cause}" if cause else ""
        super().__init__(
            f"{len(self.missing)} op(s) of this graph have no lowering to the graph engine:\n"
            f"{lines}\n"
            "Rewrite them in the model, exclude their function with torch.compiler.disable, or "
            f"register a converter or a decomposition.{tail}"
        )


def missing_lowerings(gm: torch.fx.GraphModule) -> list[MissingLowering]:
    """Return the ops of the ATen graph `gm` that have no working converter, most frequent first."""
    nodes: dict[Any, list[torch.fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            nodes[node.target].append(node)
    missing = [
        MissingLowering(str(target), len(calls), why, describe(calls[0]))
        for target, calls in nodes.items()
        if (why := why_not_lowered(target)) is not None
    ]
    return sorted(missing, key=lambda entry: (-entry.count, entry.op))


def why_not_lowered(target: Callable[..., Any]) -> str | None:
    """Return why TorchAir cannot lower `target`, None when it can or may be able to."""
    if target is operator.getitem or not isinstance(target, torch._ops.OpOverload):
        return None
    converter = _find_converter(target)
    if converter is None:
        # For other namespaces TorchAir may generate a converter from the graph engine's own IR.
        known = target.namespace not in _BUILT_IN_NAMESPACES and _engine_knows(target)
        return None if known else "no converter"
    return "converter refuses every call" if _only_raises(converter) else None


def _find_converter(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    found = getattr(target, "_ge_converter", None)
    return found if found is not None else _get_converter(target)


def _engine_knows(target: torch._ops.OpOverload) -> bool:
    """Tell whether the graph engine may have an op of this name, or may compile one."""
    from torchair._ge_concrete_graph.custom_op_compiler import discover_cann_dir
    from torchair._ge_concrete_graph.custom_op_pre_scan import _is_ge_ir_registered

    return bool(discover_cann_dir()) or _is_ge_ir_registered(target)[0]


def _only_raises(converter: Callable[..., Any]) -> bool:
    """TorchAir marks an op that it does not support by a converter whose body only raises."""
    try:
        source = inspect.getsource(inspect.unwrap(converter))
    except (OSError, TypeError):
        return False
    return "raise " in source and "return " not in source
