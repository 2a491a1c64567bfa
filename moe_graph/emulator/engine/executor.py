"""Runs a plan.

The first run of a plan checks the dtypes of every node's inputs against the op's prototype; dtypes
do not depend on the data, so later runs only call the kernels. Shapes are checked by the kernels on
every run, and the results of the graph against what NetOutput declares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from moe_graph.emulator.engine import dtypes
from moe_graph.emulator.engine.errors import GraphError
from moe_graph.emulator.engine.model import Desc
from moe_graph.emulator.engine.plan import Plan
from moe_graph.emulator.engine.steps import explain, plain_cpu, run_checked

#: A step, cut down to (call, input slots, output slots, slots to drop).
_Call: TypeAlias = tuple[
    Callable[..., Any], tuple[int, ...], int | tuple[int, ...], tuple[int, ...]
]


class Executor:
    """Executes one plan, any number of times."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop: list[_Call] = [
            (step.call, step.inputs, step.outputs, step.dead) for step in plan.steps
        ]
        self._expected = [
            (slot, node.output_descs[0].dtype, node.output_descs[0].shape)
            for slot, node in zip(plan.input_slots, plan.input_nodes, strict=True)
        ]
        self._dtypes_checked = False

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor]:
        """Execute the graph.

        Args:
            inputs: one CPU tensor per Data node.
            outputs: tensors to write the results into, one per graph output; None for an output
                (or for all) allocates.

        Returns:
            The results: `outputs` where given, else contiguous tensors that share no memory with
            inputs or with each other.

        Raises:
            GraphError: an input does not fit its Data node, a node fails, or a result does not have
                the declared dtype or shape.
        """
        with plain_cpu():
            slots = self._fill_slots(inputs)
            if self._dtypes_checked:
                self._run_steps(slots, self._aimed(outputs, inputs) if outputs else self._loop)
            else:
                self._run_steps_checked(slots)
                self._dtypes_checked = True
            results = [slots[slot] for slot in self._plan.output_slots]
            self._check_results(results)
            if outputs is None:
                return self._own(results)
            return self._write(results, outputs, inputs)

    def _fill_slots(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if len(inputs) != len(self._expected):
            raise GraphError(f"{len(inputs)} inputs", want=f"{len(self._expected)}")
        slots = self._plan.template.copy()
        for index, (slot, dtype, shape) in enumerate(self._expected):
            tensor = inputs[index]
            if tensor.dtype is not dtype or tensor.shape != shape:
                tensor = self._fit_input(index, tensor)
            slots[slot] = tensor
        return slots

    def _fit_input(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input that is not exactly what its Data node declares, if it fits."""
        node = self._plan.input_nodes[index]
        desc = node.output_descs[0]
        if desc.shape == () and tensor.numel() == 1:
            tensor = tensor.reshape(())  # TorchAir passes a size as a vector of one element
        mismatch = _mismatch(tensor, desc)
        if mismatch:
            raise GraphError(
                mismatch[0], argument=f"run input {index}", want=mismatch[1],
                op=node.type, node=node.name, fx=node.fx,
            )  # fmt: skip
        return tensor

    def _aimed(
        self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> list[_Call]:
        """Return the calls, with the kernels that can writing to `outputs` straight away."""
        taken = {_start(tensor) for tensor in inputs}
        free = [None if each is None or _start(each) in taken else each for each in outputs]
        loop = self._loop.copy()
        for position, targets in self._plan.direct:
            call, read, written, dead = loop[position]
            memory = tuple(None if target is None else free[target] for target in targets)
            loop[position] = functools.partial(call, memory=memory), read, written, dead
        return loop

    def _run_steps(self, slots: list[Any], loop: list[_Call]) -> None:
        position = 0
        try:
            for position, (call, inputs, outputs, dead) in enumerate(loop):  # noqa: B007
                result = call(*[slots[i] for i in inputs])
                if isinstance(outputs, int):
                    slots[outputs] = result
                else:
                    for slot, each in zip(outputs, result, strict=True):
                        slots[slot] = each
                for slot in dead:
                    slots[slot] = None
        except Exception as error:
            explain(self._plan.steps[position], slots, error)

    def _run_steps_checked(self, slots: list[Any]) -> None:
        for step in self._plan.steps:
            results = run_checked(step, slots)
            outputs = step.outputs if isinstance(step.outputs, tuple) else (step.outputs,)
            for slot, each in zip(outputs, results, strict=True):
                slots[slot] = each
            for slot in step.dead:
                slots[slot] = None

    def _check_results(self, results: Sequence[torch.Tensor]) -> None:
        net_output = self._plan.net_output
        for index, (result, desc) in enumerate(zip(results, net_output.input_descs, strict=True)):
            mismatch = _mismatch(result, desc)
            if mismatch:
                port = net_output.inputs[index]
                assert port is not None
                node = self._plan.graph.by_name[port.node]
                raise GraphError(
                    mismatch[0], argument=f"graph output {index}", want=mismatch[1],
                    op=node.type, node=node.name, fx=desc.fx or node.fx,
                    hint="the FX node's meta does not say what the GE op returns",
                )  # fmt: skip

    def _own(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        shared = self._plan.shared_outputs
        return [
            result.clone(memory_format=torch.contiguous_format)
            if index in shared
            else _contiguous(result)
            for index, result in enumerate(results)
        ]

    def _write(
        self,
        results: list[torch.Tensor],
        outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Copy results to where the caller wants them.

        An output may be the memory of an input (a mutated buffer) while another result is still a
        view of that input, so all such results are copied aside before the first is written.
        """
        starts = {_start(tensor) for tensor in inputs}
        if None in outputs or any(_start(each) in starts for each in outputs if each is not None):
            results = self._own(results)
        written: list[torch.Tensor] = []
        for result, output in zip(results, outputs, strict=True):
            if output is not None and output is not result:
                result = output.copy_(result)
            written.append(result)
        return written


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _contiguous(result: torch.Tensor) -> torch.Tensor:
    """Return `result` as a dense tensor that begins its own storage."""
    if result.is_contiguous() and result.storage_offset() == 0:
        return result
    return result.clone(memory_format=torch.contiguous_format)


def _mismatch(tensor: torch.Tensor, desc: Desc) -> tuple[str, str] | None:
    """Return (got, want) when a tensor is not what a descriptor declares."""
    if desc.dtype is not None and tensor.dtype != desc.dtype:
        return dtypes.name_of(tensor.dtype), dtypes.name_of(desc.dtype)
    shape = tensor.shape
    if desc.shape == (-2,):
        return None
    if len(shape) != len(desc.shape) or any(
        want >= 0 and want != got for got, want in zip(shape, desc.shape, strict=True)
    ):
        return f"shape {tuple(shape)}", f"shape {desc.shape}"
    return None
