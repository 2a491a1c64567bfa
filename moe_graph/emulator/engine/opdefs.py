"""Kernels of the ops that this project defines: one for every OpDef.

The OpDef checks dtypes, shapes and the limits of the product (`OpDef.infer`, once per distinct set
of shapes) and computes (`OpDef.kernel`); this file only binds it to a GE node.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.emulator.engine import dtypes
from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.registry import TENSOR, TENSORS, Kernel, KernelInput


@functools.cache
def kernel_of(op_type: str) -> Kernel | None:
    """Return the kernel of an op that has an OpDef, None for any other."""
    from moe_graph.ops import registry
    from moe_graph.ops.opdef import REQUIRED

    opdef = registry.find(op_type)
    if opdef is None:
        return None
    import inspect

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
    return Kernel(_OpDefCall(opdef), inputs, attrs)


class _OpDefCall:
    """Calls an OpDef on the tensors of a node."""

    def __init__(self, opdef: Any) -> None:
        self._opdef = opdef
        self._specs_of: dict[Any, list[Any]] = {}

    def __call__(self, *inputs: Any, **attrs: Any) -> Any:
        key = (tuple(map(_signature, inputs)), _hashable(attrs))
        known = self._specs_of.get(key)
        if known is None:
            bound = self._opdef.bind_attrs(attrs)
            known = self._specs_of[key] = [
                bound,
                self._opdef.infer([_spec(each) for each in inputs], bound),
            ]
        bound, specs = known
        results = self._opdef.kernel(list(inputs), bound)
        for output, spec, result in zip(self._names(specs), specs, results, strict=True):
            _check(output, spec, result)
        filled = [
            _absent(self._opdef.outputs[min(i, len(self._opdef.outputs) - 1)])
            if each is None
            else each
            for i, each in enumerate(results)
        ]
        return filled[0] if len(filled) == 1 else tuple(filled)

    def _names(self, specs: Sequence[Any]) -> list[str]:
        outputs = self._opdef.outputs
        return [outputs[min(i, len(outputs) - 1)].name for i in range(len(specs))]


def _signature(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(map(_signature, value))
    return value.shape, value.dtype


def _hashable(attrs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in attrs.values())


def _spec(value: Any) -> Any:
    from moe_graph.ops.opdef import TensorSpec

    if isinstance(value, list):
        return [_spec(each) for each in value]
    return None if value is None else TensorSpec.of(value)


def _check(name: str, spec: Any, result: torch.Tensor | None) -> None:
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


def _absent(output: Any) -> torch.Tensor:
    """Return what stands for an output that the attributes leave out."""
    return torch.empty(0, dtype=output.dtype or torch.float32)
