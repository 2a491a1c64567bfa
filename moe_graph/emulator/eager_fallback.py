"""One kernel for every operator: run it on the CPU, over the memory of the device tensors.

``aten::add.Tensor(npu a, npu b)`` becomes ``aten::add.Tensor(cpu a', cpu b')`` with ``a'`` and
``b'`` over the same memory. Arguments that the operator writes to come back as they are; fresh
results are copied into device tensors. What an operator writes, draws or allocates is read from its
schema, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_graph.emulator.eager_memory import CPU, DeviceAllocator, cpu_view
from moe_graph.emulator.eager_random import cpu_generator, default_stream

Kernel = Callable[..., Any]


class MissingKernelError(NotImplementedError):
    """An operator has no kernel on the emulated device; the message names it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} has no kernel on the emulated NPU: move its inputs to the CPU, "
            "or run this on an Ascend machine"
        )


def find_overload(name: str) -> torch._ops.OpOverload:
    """Return the operator called `name`, for example ``"aten::add.Tensor"``."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base)
    found: torch._ops.OpOverload = getattr(packet, overload or "default")
    return found


class _Plan:
    """What the schema of one operator says about its arguments and results."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        names = [argument.name for argument in schema.arguments]
        alias = {
            argument.name: argument.alias_info
            for argument in schema.arguments
            if argument.alias_info is not None
        }
        self.written = [name for name, info in alias.items() if info.is_write]
        self.outs = [
            argument.name
            for argument in schema.arguments
            if argument.kwarg_only and argument.name in self.written
        ]
        self.is_view = bool(alias) and not self.written
        self.takes_device = "device" in names
        self.takes_generator = "generator" in names
        self.generator_position = names.index("generator") if self.takes_generator else -1
        self.draws = torch.Tag.nondeterministic_seeded in op.tags and not self.takes_generator
        self.device_position = names.index("device") if self.takes_device else -1
        self.is_plain = not (
            self.outs or self.is_view or self.takes_device or self.takes_generator or self.draws
        )


class CpuKernels:
    """Makes kernels of the emulated device out of CPU operators."""

    def __init__(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator

    def for_operator(self, name: str) -> Kernel:
        """Return the kernel of the operator called `name`, resolved at its first call."""
        resolved: Kernel | None = None

        def kernel(*args: Any, **kwargs: Any) -> Any:
            nonlocal resolved
            if resolved is None:
                op = find_overload(name)
                resolved = self._bind(op, _Plan(op))
            return resolved(*args, **kwargs)

        return kernel

    def for_function(self, function: Kernel) -> Kernel:
        """Return the kernel that calls `function`, written for CPU tensors, in place of an op."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            call = _Call()
            cpu_args = [call.to_cpu(argument) for argument in args]
            cpu_kwargs = {key: call.to_cpu(value) for key, value in kwargs.items()}
            return self._results(function(*cpu_args, **cpu_kwargs), call)

        return kernel

    def _bind(self, op: torch._ops.OpOverload, plan: _Plan) -> Kernel:
        if plan.is_plain:
            return self.for_function(op)
        if plan.is_view:
            return _view_kernel(op)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            call = _Call()
            outs = {name: kwargs.pop(name) for name in plan.outs}
            cpu_args = [call.to_cpu(argument) for argument in args]
            cpu_kwargs = {key: call.to_cpu(value) for key, value in kwargs.items()}
            for out in outs.values():
                call.device = call.device or out.device
            if plan.takes_device:
                _place_on_cpu(plan, call, cpu_args, cpu_kwargs)
            if plan.takes_generator:
                given = cpu_kwargs.get("generator")
                if 0 <= plan.generator_position < len(cpu_args):
                    given = cpu_args[plan.generator_position]
                    cpu_args[plan.generator_position] = cpu_generator(given, call.device)
                else:
                    cpu_kwargs["generator"] = cpu_generator(given, call.device)
            if outs:
                return _run_out(op, outs, cpu_args, cpu_kwargs)
            if plan.draws:
                with default_stream(call.device):
                    return self._results(op(*cpu_args, **cpu_kwargs), call)
            return self._results(op(*cpu_args, **cpu_kwargs), call)

        return kernel

    def _results(self, result: Any, call: _Call) -> Any:
        if isinstance(result, torch.Tensor):
            for npu, view in call.pairs:
                if view is result:
                    return npu
            device = call.device
            if device is None or device.type == "cpu":
                return result
            return self._allocator.to_device(result, device)
        if isinstance(result, (list, tuple)):
            return type(result)(self._results(item, call) for item in result)
        return result


class _Call:
    """The tensors of one call, on both sides, and where its results belong."""

    __slots__ = ("device", "pairs")

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.device: torch.device | None = None

    def to_cpu(self, argument: Any) -> Any:
        """Return `argument` with every device tensor replaced by its CPU view."""
        if isinstance(argument, torch.Tensor):
            if argument.is_cpu:
                return argument
            if self.device is None:
                self.device = argument.device
            elif argument.device != self.device:
                raise RuntimeError(
                    f"tensors on different devices: got {argument.device}, want {self.device} "
                    "as for the tensors before it"
                )
            view = cpu_view(argument)
            self.pairs.append((argument, view))
            return view
        if isinstance(argument, (list, tuple)):
            return type(argument)([self.to_cpu(item) for item in argument])
        return argument


def _place_on_cpu(plan: _Plan, call: _Call, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Note the device that an operator shall allocate on, and let it allocate on the CPU."""
    wanted = kwargs.get("device")
    if plan.device_position < len(args):
        wanted, args[plan.device_position] = args[plan.device_position], CPU
    else:
        kwargs["device"] = CPU
    kwargs.pop("pin_memory", None)
    if wanted is not None:
        call.device = torch.device(wanted)


def _run_out(
    op: torch._ops.OpOverload,
    outs: dict[str, torch.Tensor],
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run an ``out=`` overload into fresh memory, since a view of the device's cannot grow."""
    fresh = {name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()}
    op(*args, **kwargs, **fresh)
    for name, out in outs.items():
        if out.shape != fresh[name].shape:
            out.resize_(fresh[name].shape)
        cpu_view(out).copy_(fresh[name])
    results = tuple(outs.values())
    return results[0] if len(results) == 1 else results


def _view_kernel(op: torch._ops.OpOverload) -> Kernel:
    """Return the kernel of a view: the CPU says its sizes, the device tensor is viewed so."""

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def like(view: torch.Tensor) -> torch.Tensor:
            if view.dtype != tensor.dtype:
                raise MissingKernelError(str(op))
            return tensor.as_strided(view.shape, view.stride(), view.storage_offset())

        result = op(cpu_view(tensor), *args, **kwargs)
        return like(result) if isinstance(result, torch.Tensor) else [like(r) for r in result]

    return kernel
