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
from moe_graph.ops.checks_once import ChecksOnce
from moe_graph.ops.opdef import REQUIRED, OpDef, Output, TensorSpec
from moe_graph.ops.product import current_product

#: An optional input, or the list of a dynamic one.
Value: TypeAlias = torch.Tensor | list[torch.Tensor] | None


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
        self._checks = ChecksOnce(opdef)

    def __call__(
        self, *inputs: Value, memory: Sequence[torch.Tensor | None] = (), **attrs: Any
    ) -> tuple[torch.Tensor, ...]:
        product = current_product()
        self._opdef.require_in_graph_engine(product)
        bound, specs = self._checks(inputs, attrs, product)
        results = self._opdef.kernel(list(inputs), bound, product, memory)
        outputs = [self._output(index) for index in range(len(results))]
        for output, spec, result in zip(outputs, specs, results, strict=True):
            _check(output.name, spec, result)
        return tuple(
            _absent(output) if result is None else result
            for output, result in zip(outputs, results, strict=True)
        )

    def _output(self, index: int) -> Output:
        """Return the IR output that result `index` belongs to; the last one may be a list."""
        return self._opdef.outputs[min(index, len(self._opdef.outputs) - 1)]


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
