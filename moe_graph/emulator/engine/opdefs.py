"""Kernels of the ops that this project defines: one for every OpDef.

The OpDef checks dtypes, shapes and the limits of the product (`OpDef.infer`, once per distinct set
of shapes) and computes (`OpDef.kernel`); this file only binds it to a GE node.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from moe_graph.emulator.engine import dtypes
from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.registry import TENSOR, TENSORS, Kernel, KernelInput
from moe_graph.ops import registry
from moe_graph.ops.opdef import REQUIRED, OpDef, Output, Specs, TensorSpec
from moe_graph.ops.product import current_product

#: An optional input, or the list of a dynamic one.
Value: TypeAlias = torch.Tensor | list[torch.Tensor] | None

#: Shape sets whose check is remembered per op; a graph of unknown sizes may bring any number.
_REMEMBERED = 1024


@functools.cache
def kernel_of(op_type: str) -> Kernel | None:
    """Return the kernel of an op that has an OpDef, None for any other."""
    opdef = registry.find(op_type)
    if opdef is None:
        return None
    inputs = tuple(
        KernelInput(
            each.name, TENSORS if each.kind == "dynamic" else TENSOR, each.kind != "required"
        )
        for each in opdef.inputs
    )
    attrs = {
        each.name: (inspect.Parameter.empty if each.default is REQUIRED else each.default, False)
        for each in opdef.attrs
    }
    return Kernel(_OpDefCall(opdef), inputs, attrs, returns_tuple=True, takes_memory=True)


class _OpDefCall:
    """Calls an OpDef on the tensors of a node."""

    def __init__(self, opdef: OpDef) -> None:
        self._opdef = opdef
        self._known: dict[Any, tuple[dict[str, Any], Specs]] = {}

    def __call__(
        self, *inputs: Value, memory: Sequence[torch.Tensor | None] = (), **attrs: Any
    ) -> tuple[torch.Tensor, ...]:
        bound, specs = self._checked(inputs, attrs)
        results = self._opdef.kernel(list(inputs), bound, memory=memory)
        outputs = [self._output(index) for index in range(len(results))]
        for output, spec, result in zip(outputs, specs, results, strict=True):
            _check(output.name, spec, result)
        return tuple(
            _absent(output) if result is None else result
            for output, result in zip(outputs, results, strict=True)
        )

    def _checked(
        self, inputs: tuple[Value, ...], attrs: dict[str, Any]
    ) -> tuple[dict[str, Any], Specs]:
        """Return the complete attributes and the output specs, from memory where possible."""
        key = (tuple(map(_signature, inputs)), _hashable(attrs), current_product())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._opdef.require_in_graph_engine(current_product())
            bound = self._opdef.bind_attrs(attrs)
            specs = self._opdef.infer([_spec(each) for each in inputs], bound)
            known = self._known[key] = (bound, specs)
        return known

    def _output(self, index: int) -> Output:
        """Return the IR output that result `index` belongs to; the last one may be a list."""
        return self._opdef.outputs[min(index, len(self._opdef.outputs) - 1)]


def _signature(value: Value) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return None if value is None else tuple(map(_signature, value))


def _hashable(attrs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in attrs.values())


def _spec(value: Value) -> TensorSpec | list[TensorSpec] | None:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    return None if value is None else [TensorSpec.of(each) for each in value]


def _check(name: str, spec: TensorSpec | None, result: torch.Tensor | None) -> None:
    """Compare a result with what the shape rule promised; -1 is a size that depends on the data."""
    if spec is None or result is None:
        if (spec is None) != (result is None):
            raise KernelError(name, "a tensor" if spec is None else "nothing", "the opposite")
        return
    fits = len(spec.shape) == result.dim() and all(
        want in (-1, got) for want, got in zip(spec.shape, result.shape, strict=True)
    )
    if not fits or spec.dtype != result.dtype:
        got = f"{dtypes.name_of(result.dtype)}{list(result.shape)}"
        raise KernelError(name, got, f"{dtypes.name_of(spec.dtype)}{list(spec.shape)}")


def _absent(output: Output) -> torch.Tensor:
    """Return what stands for an output that the attributes leave out."""
    return torch.empty(0, dtype=output.dtype or torch.float32)
