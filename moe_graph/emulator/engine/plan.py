"""Turns a parsed graph into a plan: a list of steps over numbered slots.

Everything that does not depend on the numbers happens here, once, when a graph is added: kernels
are looked up, attributes bound, constants read and folded, the order chosen, slots numbered, and
for every slot the step after which it is not needed any more.

A view of a buffer that some node writes in place is a copy; for the order see `order.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_graph.emulator.engine import registry
from moe_graph.emulator.engine.errors import GraphError, KernelError
from moe_graph.emulator.engine.model import INPUT_TYPES, Graph, Node, Port
from moe_graph.emulator.engine.order import execution_order, written_buffers
from moe_graph.emulator.engine.registry import HOST_LIST, HOST_SCALAR, TENSORS, Kernel, KernelInput
from moe_graph.emulator.engine.steps import Step, plain_cpu, run_checked

_CONSTANTS = frozenset({"Const", "Constant"})
#: A constant larger than this (elements) is recomputed per run rather than kept.
FOLD_LIMIT = 1 << 16


@dataclass
class Plan:
    """An executable graph.

    Attributes:
        steps: in order of execution.
        template: initial slots: constants where they are known, None elsewhere.
        input_slots: slot of every run input.
        input_nodes: the Data nodes, in the same order.
        output_slots: slot of every graph output.
        shared_outputs: positions of outputs that may share memory with an input, a constant or
            another output.
        direct: (step, per result of the step the graph output whose memory it can be written to).
        net_output: declares dtypes and shapes of the outputs.
    """

    graph: Graph
    steps: list[Step] = field(default_factory=list)
    template: list[Any] = field(default_factory=list)
    input_slots: list[int] = field(default_factory=list)
    input_nodes: list[Node] = field(default_factory=list)
    output_slots: list[int] = field(default_factory=list)
    shared_outputs: frozenset[int] = frozenset()
    direct: list[tuple[int, tuple[int | None, ...]]] = field(default_factory=list)

    @property
    def net_output(self) -> Node:
        """The node that declares dtypes and shapes of the outputs."""
        return self.graph.net_output


def build(graph: Graph) -> Plan:
    """Plan a graph.

    Raises:
        GraphError: an op is unknown, an attribute or input is missing or unknown, there is a cycle,
            or a constant part of the graph fails to compute.
    """
    return _Planner(graph).build()


def _host_scalar(tensor: torch.Tensor) -> Any:
    if tensor.numel() != 1:
        raise KernelError("", f"shape {tuple(tensor.shape)}", "one element")
    return tensor.item()


def _host_list(tensor: torch.Tensor) -> list[Any]:
    return tensor.reshape(-1).tolist()


_READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    HOST_SCALAR: _host_scalar,
    HOST_LIST: _host_list,
}


class _Planner:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.plan = Plan(graph)
        self.slot_of: dict[Port, int] = {}
        self.host_slot_of: dict[tuple[int, str], int] = {}
        self.constant: set[int] = set()
        self.root_of: dict[int, int] = {}
        self.kernels: dict[str, Kernel] = {}
        self.written: set[Port] = set()
        self.foreign: set[int] = set()  # slots with memory that the graph does not own

    def build(self) -> Plan:
        self._find_kernels()
        order = execution_order(self.graph, self.kernels)
        self.written = written_buffers(self.graph, self.kernels)
        for node in self.graph.inputs:
            slot = self._new_slot()
            self.plan.input_slots.append(slot)
            self.plan.input_nodes.append(node)
            self.slot_of[Port(node.name, 0)] = slot
        self._check_input_indices()
        for node in order:
            if node.type in _CONSTANTS:
                self.slot_of[Port(node.name, 0)] = self._new_slot(self._constant(node))
            elif node.type == "NetOutput":
                self.plan.output_slots = [self.slot_of[port] for port in node.inputs if port]
            elif node.type not in INPUT_TYPES:
                self._add(node)
        self._mark_dead()
        self._mark_shared()
        self._mark_direct()
        return self.plan

    def _find_kernels(self) -> None:
        unknown: dict[str, Node] = {}
        for node in self.graph.nodes:
            if node.type in INPUT_TYPES or node.type in _CONSTANTS or node.type == "NetOutput":
                continue
            kernel = registry.find(node.type)
            if kernel is None:
                unknown.setdefault(node.type, node)
            else:
                self.kernels[node.name] = kernel
        if unknown:
            first = next(iter(unknown.values()))
            raise GraphError(
                "an op that the emulator does not execute"
                + (f" (also: {', '.join(list(unknown)[1:])})" if len(unknown) > 1 else ""),
                op=first.type, node=first.name, fx=first.fx,
                hint="add a kernel to moe_graph/emulator/engine/kernels",
            )  # fmt: skip

    def _check_input_indices(self) -> None:
        indices = [node.attrs.get("index", 0) for node in self.plan.input_nodes]
        if indices != list(range(len(indices))):
            raise GraphError(f"Data nodes with indices {indices}", want="0, 1, 2, ... without gaps")

    # -- steps ---------------------------------------------------------------------------------

    def _new_slot(self, value: Any = None) -> int:
        self.plan.template.append(value)
        slot = len(self.plan.template) - 1
        if value is not None:
            self.constant.add(slot)
        self.root_of[slot] = slot
        return slot

    def _constant(self, node: Node) -> torch.Tensor:
        value = node.attrs.get("value")
        if not isinstance(value, torch.Tensor):
            raise GraphError("no value", op=node.type, node=node.name, fx=node.fx, want="a tensor")
        return value

    def _add(self, node: Node) -> None:
        kernel = self.kernels[node.name]
        count = len(node.output_descs)
        if not kernel.returns_tuple and count != 1:
            raise GraphError(f"{count} outputs", op=node.type, node=node.name, fx=node.fx, want="1")
        call = self._bind_attrs(node, kernel)
        inputs, groups, tensors = self._bind_inputs(node, kernel)
        if groups is not None:
            call = functools.partial(_call_grouped, call, groups)
        writes_constant = bool(kernel.mutates) and self.root_of[inputs[0]] in self.constant
        if writes_constant:
            call = functools.partial(_call_on_copy, call)
        if kernel.view and node.inputs and node.inputs[0] in self.written:
            call = functools.partial(_copy_of_result, call)
        elif self._fold(node, kernel, call, inputs, tensors):
            return
        slots = tuple(self._new_slot() for _ in range(count))
        for index, slot in enumerate(slots):
            self.slot_of[Port(node.name, index)] = slot
        if kernel.view and not inputs:
            self.foreign.add(slots[0])
        elif kernel.view or (kernel.mutates and not writes_constant):
            self.root_of[slots[0]] = self.root_of[inputs[0]]
        outputs = slots if kernel.returns_tuple else slots[0]
        self.plan.steps.append(Step(node, call, inputs, outputs, tensors, kernel.same_dtype))

    def _bind_attrs(self, node: Node, kernel: Kernel) -> Callable[..., Any]:
        where = {"op": node.type, "node": node.name, "fx": node.fx}
        try:
            bound = registry.bind_attrs(kernel, node.attrs)
        except KeyError as error:
            name = error.args[0]
            raise GraphError("no value", argument=name, want="a value", **where) from None
        except LookupError as error:
            name = error.args[0]
            raise GraphError(
                f"{node.attrs[name]!r}", argument=name,
                want="no such attribute: the emulator's kernel does not implement it", **where,
            ) from None  # fmt: skip
        except ValueError as error:
            raise GraphError(str(error), **where) from None
        return functools.partial(kernel.function, **bound) if bound else kernel.function

    def _bind_inputs(
        self, node: Node, kernel: Kernel
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[tuple[str, int], ...]]:
        """Return the slots of the call, the sizes of its groups (None: one each), the tensors."""
        by_name: dict[str, Port | None] = {}
        for desc, port in zip(node.input_descs, node.inputs, strict=False):
            by_name[desc.name] = port
        slots: list[int] = []
        sizes: list[int] = []
        tensors: list[tuple[str, int]] = []
        used = 0
        for wanted in kernel.inputs:
            if wanted.binding == TENSORS:
                names = _dynamic_names(wanted.name, by_name)
                used += len(names)
                ports = [by_name[name] for name in names]
                slots += [self.slot_of[port] for port in ports if port is not None]
                sizes.append(len(ports))
                tensors += list(zip(names, slots[len(slots) - len(ports) :], strict=True))
                continue
            sizes.append(-1)
            used += wanted.name in by_name
            port = by_name.get(wanted.name)
            if port is None:
                if not wanted.optional:
                    raise GraphError(
                        "nothing", argument=wanted.name, want="a tensor",
                        op=node.type, node=node.name, fx=node.fx,
                    )  # fmt: skip
                slots.append(self._none_slot())
            elif wanted.binding in _READERS:
                slots.append(self._host_slot(node, wanted, self.slot_of[port]))
            else:
                slots.append(self.slot_of[port])
            if port is not None:
                tensors.append((wanted.name, self.slot_of[port]))
        if used < len(by_name):
            self._refuse_extra_input(node, kernel, by_name)
        grouped = any(size >= 0 for size in sizes)
        return tuple(slots), tuple(sizes) if grouped else None, tuple(tensors)

    def _refuse_extra_input(
        self, node: Node, kernel: Kernel, by_name: dict[str, Port | None]
    ) -> None:
        known = {each.name for each in kernel.inputs if each.binding != TENSORS}
        dynamic = [each.name for each in kernel.inputs if each.binding == TENSORS]
        for name, port in by_name.items():
            if port is None or name in known:
                continue
            if not any(name in _dynamic_names(stem, by_name) for stem in dynamic):
                raise GraphError(
                    "a tensor", argument=name, op=node.type, node=node.name, fx=node.fx,
                    want="nothing: the emulator's kernel does not implement this input",
                )  # fmt: skip

    def _none_slot(self) -> int:
        slot = self._new_slot()
        self.constant.add(slot)
        return slot

    def _host_slot(self, node: Node, wanted: KernelInput, source: int) -> int:
        """Return the slot with the Python value of the tensor in slot `source`."""
        key = (source, wanted.binding)
        if key not in self.host_slot_of:
            reader = _READERS[wanted.binding]
            step = Step(node, reader, (source,), -1, ((wanted.name, source),), reads=wanted.name)
            if source in self.constant:
                (value,) = run_checked(step, self.plan.template)
                self.host_slot_of[key] = self._new_slot(value)
            else:
                step.outputs = self.host_slot_of[key] = self._new_slot()
                self.plan.steps.append(step)
        return self.host_slot_of[key]

    def _fold(
        self,
        node: Node,
        kernel: Kernel,
        call: Callable[..., Any],
        inputs: tuple[int, ...],
        tensors: tuple[tuple[str, int], ...],
    ) -> bool:
        """Compute a node of constants now, unless the result is large."""
        if not kernel.pure or kernel.mutates or not self.constant.issuperset(inputs):
            return False
        template = self.plan.template
        step = Step(node, call, inputs, -1, tensors, kernel.same_dtype)
        with plain_cpu():
            results = run_checked(step, template)
        if any(result.numel() > FOLD_LIMIT for result in results):
            return False
        for index, result in enumerate(results):
            self.slot_of[Port(node.name, index)] = self._new_slot(result)
        return True

    # -- liveness ------------------------------------------------------------------------------

    def _mark_dead(self) -> None:
        kept = self.constant | set(self.plan.output_slots)
        used: set[int] = set()
        for step in reversed(self.plan.steps):
            outputs = step.outputs if isinstance(step.outputs, tuple) else (step.outputs,)
            checked = [slot for _, slot in step.tensors]  # read by checks and error messages
            dead = [
                slot
                for slot in dict.fromkeys((*step.inputs, *checked, *outputs))
                if slot not in used and slot not in kept
            ]
            used.update(dead)
            step.dead = tuple(dead)

    def _mark_shared(self) -> None:
        """Find outputs whose memory may belong to something else as well."""
        roots = [self.root_of[slot] for slot in self.plan.output_slots]
        owned = set(self.plan.input_slots) | self.constant | self.foreign
        self.plan.shared_outputs = frozenset(
            i for i, root in enumerate(roots) if root in owned or root in roots[:i]
        )

    def _mark_direct(self) -> None:
        """Find results that are graph outputs as they are, of kernels that can be told where."""
        wanted = {
            slot: index
            for index, slot in enumerate(self.plan.output_slots)
            if index not in self.plan.shared_outputs
        }
        for position, step in enumerate(self.plan.steps):
            if step.node is not None and self.kernels[step.node.name].takes_memory:
                slots = step.outputs if isinstance(step.outputs, tuple) else (step.outputs,)
                targets = tuple(wanted.get(slot) for slot in slots)
                if any(target is not None for target in targets):
                    self.plan.direct.append((position, targets))


def _dynamic_names(stem: str, by_name: dict[str, Port | None]) -> list[str]:
    """Return ``stem0, stem1, ...`` as far as they are fed."""
    names: list[str] = []
    while by_name.get(f"{stem}{len(names)}") is not None:
        names.append(f"{stem}{len(names)}")
    return names


def _call_grouped(
    call: Callable[..., Any], sizes: tuple[int, ...], *flat: Any, **memory: Any
) -> Any:
    """Call with consecutive arguments gathered into lists; size -1 stands for a single argument."""
    arguments: list[Any] = []
    position = 0
    for size in sizes:
        if size < 0:
            arguments.append(flat[position])
            position += 1
        else:
            arguments.append(list(flat[position : position + size]))
            position += size
    return call(*arguments, **memory)


def _call_on_copy(call: Callable[..., Any], first: torch.Tensor, *rest: Any) -> Any:
    """Call an op that writes its first input on a copy of it, so that a constant stays constant."""
    return call(first.clone(), *rest)


def _copy_of_result(call: Callable[..., Any], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = call(*arguments).clone()
    return result
