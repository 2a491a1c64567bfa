"""The table of GE ops that the engine can execute: one small function per op.

A kernel's signature says how it is bound to a node::

    @ge_op("Cumsum")
    def cumsum(x: Tensor, axis: Int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:

Positional parameters are the op's inputs, by their GE names. ``Tensor`` takes the tensor,
``Tensor | None`` an optional input, ``Tensors`` a dynamic one (``x0, x1, ...``). ``Int``, ``Ints``
and ``Number`` take the *value* of an input tensor as Python ints or a number: the plan reads a
constant once and any other tensor at run time. Keyword-only parameters are attributes with their
GE defaults; one annotated ``torch.dtype`` is translated from GE's number. Everything is bound when
a graph is added, so that a run only calls ``function(*tensors)``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from moe_graph.emulator.engine import dtypes

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[torch.Tensor]
#: Input read as one Python int.
Int: TypeAlias = int
#: Input read as a list of Python ints (a scalar gives a list of one).
Ints: TypeAlias = list[int]
#: Input read as one Python number of its dtype.
Number: TypeAlias = bool | int | float

#: How an input reaches the kernel.
TENSOR, TENSORS, HOST_SCALAR, HOST_LIST = "tensor", "tensors", "host scalar", "host list"
_BINDINGS = {"Tensors": TENSORS, "Int": HOST_SCALAR, "Number": HOST_SCALAR, "Ints": HOST_LIST}


@dataclass(frozen=True)
class KernelInput:
    """One input of a kernel: its GE name, how it is bound, whether it may be absent."""

    name: str
    binding: str
    optional: bool


@dataclass(frozen=True)
class Kernel:
    """An executable GE op.

    Attributes:
        function: called with one argument per input; returns a tensor, or a tuple of tensors when
            the op may have several outputs.
        inputs: in order.
        attrs: attribute name -> (default or ``inspect.Parameter.empty``, is a dtype).
        ignored: attributes that do not change the numbers.
        view: the first output may share memory with the first input (or, without inputs, with
            memory that the graph does not own).
        mutates: input that is written in place and returned as the first output, "" for none.
        pure: same inputs, same outputs: may be computed once when all inputs are constants.
        same_dtype: inputs that must have the same dtype.
        returns_tuple: `function` returns a tuple, of one tensor even.
        takes_memory: `function` has a keyword argument ``memory``: per output, a tensor that it may
            write it to, None where it must allocate.
    """

    function: Callable[..., Any]
    inputs: tuple[KernelInput, ...]
    attrs: dict[str, tuple[Any, bool]]
    ignored: frozenset[str] = frozenset()
    view: bool = False
    mutates: str = ""
    pure: bool = True
    same_dtype: tuple[str, ...] = ()
    returns_tuple: bool = False
    takes_memory: bool = False


#: Attributes by which TorchAir tells GE how to label dims (NCHW); strides stay row-major.
_LAYOUT_HINTS = frozenset({"input_layout_info", "output_layout_info"})

_KERNELS: dict[str, Kernel] = {}


def ge_op(
    *op_types: str,
    ignored: Sequence[str] = (),
    view: bool = False,
    mutates: str = "",
    pure: bool = True,
    same_dtype: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the kernel of `op_types`; see the module docstring.

    `names` are the GE names of the inputs where they are not those of the parameters.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        inputs, attrs = _from_signature(function)
        if names:
            inputs = tuple(
                replace(each, name=name) for each, name in zip(inputs, names, strict=True)
            )
        returned = str(inspect.signature(function).return_annotation)
        kernel = Kernel(
            function, inputs, attrs, frozenset(ignored), view, mutates, pure, tuple(same_dtype),
            returns_tuple=returned.startswith("tuple"),
        )  # fmt: skip
        for op_type in op_types:
            _register(op_type, kernel)
        return function

    return register


def direct(
    function: Callable[..., Any], *inputs: str, same_dtype: bool = True
) -> Callable[[str], None]:
    """Return a function that registers `function` itself, called on `inputs`, for an op type.

    For ops that are one PyTorch function and have no attributes.
    """
    arguments = tuple(KernelInput(name, TENSOR, optional=False) for name in inputs)
    kernel = Kernel(function, arguments, {}, same_dtype=inputs if same_dtype else ())
    return lambda op_type: _register(op_type, kernel)


def _register(op_type: str, kernel: Kernel) -> None:
    if op_type in _KERNELS:
        raise ValueError(f"GE op {op_type} has two kernels")
    _KERNELS[op_type] = kernel


def _from_signature(
    function: Callable[..., Any],
) -> tuple[tuple[KernelInput, ...], dict[str, tuple[Any, bool]]]:
    inputs: list[KernelInput] = []
    attrs: dict[str, tuple[Any, bool]] = {}
    for parameter in inspect.signature(function).parameters.values():
        annotation = str(parameter.annotation)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            attrs[parameter.name] = (parameter.default, annotation == "torch.dtype")
            continue
        kind, _, rest = annotation.partition(" | ")
        inputs.append(
            KernelInput(parameter.name.rstrip("_"), _BINDINGS.get(kind, TENSOR), rest == "None")
        )
    return tuple(inputs), attrs


@functools.cache
def _load_kernels() -> None:
    from moe_graph.emulator.engine import kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


def find(op_type: str) -> Kernel | None:
    """Return the kernel of a GE op, None when the engine has none."""
    _load_kernels()
    kernel = _KERNELS.get(op_type)
    if kernel is None:
        from moe_graph.emulator.engine.opdefs import kernel_of

        kernel = kernel_of(op_type)
    return kernel


def supported() -> list[str]:
    """Return the GE op types that the engine executes, OpDefs not included, in order."""
    _load_kernels()
    return sorted(_KERNELS)


def bind_attrs(kernel: Kernel, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a kernel from the attributes of a node.

    Raises:
        KeyError: a required attribute is missing; the argument is its name.
        LookupError: the node has an attribute that the kernel does not know.
        ValueError: a dtype attribute is no dtype that the engine computes in.
    """
    unknown = [
        name
        for name in given
        if name not in kernel.attrs and name not in kernel.ignored and name not in _LAYOUT_HINTS
    ]
    if unknown:
        raise LookupError(unknown[0])
    bound: dict[str, Any] = {}
    for name, (default, is_dtype) in kernel.attrs.items():
        if name in given:
            bound[name] = dtypes.from_ge(given[name]) if is_dtype else given[name]
        elif default is inspect.Parameter.empty:
            raise KeyError(name)
        else:
            bound[name] = default
    return bound
