"""One step of a plan, and its execution with every check.

A failing kernel is reported with the GE node, the FX node it came from and its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from moe_graph.emulator.engine import dtypes, ir
from moe_graph.emulator.engine.errors import GraphError, KernelError
from moe_graph.emulator.engine.model import Node
from moe_graph.ops.defs.support.workers import one_thread
from moe_graph.ops.errors import OpError


@dataclass
class Step:
    """One call. ``slots[outputs] = call(*[slots[i] for i in inputs])``, then `dead` is dropped.

    Attributes:
        node: the GE node.
        tensors: (GE input name, slot) of the inputs that are tensors.
        same_dtype: GE inputs that must have the same dtype.
        reads: the input of the node whose Python value this step reads; "" for the node itself.
        outputs: one slot, or a tuple of slots when the op has several outputs.
    """

    node: Node
    call: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: int | tuple[int, ...]
    tensors: tuple[tuple[str, int], ...] = ()
    same_dtype: tuple[str, ...] = ()
    dead: tuple[int, ...] = ()
    reads: str = ""


@contextlib.contextmanager
def plain_cpu() -> Iterator[None]:
    """Compute without autograd, and whatever the caller has set for its own PyTorch calls.

    Autocast, a default device or a dispatch mode must not reach into the kernels: to the caller
    a graph is one operator of the device.

    Operators of PyTorch run in one thread, so that the number of threads cannot show in their
    results; kernels with much to do share it out in parts
    (:mod:`moe_graph.ops.defs.support.workers`).
    """
    with (
        torch.inference_mode(),
        torch.autocast("cpu", enabled=False),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        one_thread(),
    ):
        yield


def run_checked(step: Step, slots: Sequence[Any]) -> list[Any]:
    """Run one step with all checks; return its results as a list."""
    _check_dtypes(step, slots)
    try:
        result = step.call(*[slots[i] for i in step.inputs])
    except Exception as error:
        explain(step, slots, error)
    return list(result) if isinstance(result, tuple) else [result]


def _check_dtypes(step: Step, slots: Sequence[Any]) -> None:
    node = step.node
    prototype = ir.definition(node.type)
    first_of: dict[str, torch.Tensor] = {}  # of inputs that share a type symbol or must be alike
    for name, slot in step.tensors:
        argument = prototype.argument(name) if prototype else None
        tensor = slots[slot]
        group = "same" if name in step.same_dtype else argument.symbol if argument else ""
        first = first_of.setdefault(group, tensor) if group else tensor
        allowed = argument.dtypes if argument else None
        if first.dtype != tensor.dtype:
            if _is_scalar_for(tensor, first) or _is_scalar_for(first, tensor):
                continue
            allowed = frozenset({first.dtype})
        if allowed is not None and tensor.dtype not in allowed:
            raise GraphError(
                dtypes.name_of(tensor.dtype), argument=name,
                want="one of " + ", ".join(sorted(map(dtypes.name_of, allowed))),
                op=node.type, node=node.name, fx=node.fx,
            )  # fmt: skip


def _is_scalar_for(scalar: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True for a scalar that takes the dtype of `tensor`.

    TorchAir's converters make Python numbers int64 or float constants beside tensors of any dtype.
    """
    return scalar.dim() == 0 and torch.result_type(scalar, tensor) == tensor.dtype


def explain(step: Step, slots: Sequence[Any], error: Exception) -> NoReturn:
    """Raise `error` as a :class:`GraphError` that names the node and its inputs."""
    if isinstance(error, GraphError):
        raise error
    node = step.node
    if isinstance(error, KernelError):
        raise GraphError(
            error.got, argument=error.argument or step.reads, want=error.want,
            op=node.type, node=node.name, fx=node.fx,
        ) from error  # fmt: skip
    if isinstance(error, OpError):
        product = f" on {error.product}" if error.product else ""
        raise GraphError(
            error.got, argument=error.argument, want=error.want + product, hint=error.hint,
            op=node.type, node=node.name, fx=node.fx,
        ) from error  # fmt: skip
    inputs = ", ".join(
        f"{name} {dtypes.name_of(slots[slot].dtype)}{list(slots[slot].shape)}"
        for name, slot in step.tensors
        if isinstance(slots[slot], torch.Tensor)
    )
    raise GraphError(
        f"{error} (inputs: {inputs})", op=node.type, node=node.name, fx=node.fx
    ) from error
