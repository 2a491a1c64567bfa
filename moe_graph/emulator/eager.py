"""Gives the emulated device its operators, in place of the kernels that torch_npu has for an NPU.

torch_npu registers a kernel for some 1,500 ``aten`` and 400 ``npu`` operators, which end in CANN
libraries that do not exist here. :func:`install` puts a kernel in the place of each:

====================================  =============================================
views, storage and metadata           torch_npu's own, which need no device
``aten`` operators with a CPU kernel  that kernel, over the device's memory
those in ``eager_aten.py`` and so on  written here, for lack of a CPU kernel
everything else                       an error that names the operator
====================================  =============================================

Only device kernels change. Autograd, meta and decomposition registrations stay as torch_npu has
them, so a model is traced here exactly as on an Ascend machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame  # without torch._dynamo, which takes a second to import
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode

from moe_graph.emulator import eager_aten, eager_attention, eager_npu
from moe_graph.emulator.eager_fallback import (
    CpuKernels,
    Kernel,
    MissingKernelError,
    find_overload,
)
from moe_graph.emulator.eager_memory import DeviceAllocator, copy_

_DEVICE_KEY = "PrivateUse1"
_AUTOGRAD_KEY = "AutogradPrivateUse1"
_CPU_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)

# Kernels of torch_npu that only touch metadata or memory, or are made of replaced operators; in
# namespaces ``aten`` and ``npu``.
_KEPT = frozenset(
    (
        "_lazy_clone",
        "_local_scalar_dense",
        "_npu_storage_resize",
        "_pin_memory",
        "_reshape_alias",
        "as_strided",
        "as_strided_",
        "contiguous",
        "copy_memory_",
        "empty_like",
        "empty_with_format",
        "empty_with_swapped_memory",
        "get_npu_format",
        "get_storage_size",
        "is_pinned",
        "is_set_to",
        "new_empty_strided",
        "npu_change_data_ptr",
        "record_stream",
        "resize_",
        "resize_as_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "squeeze",
        "squeeze.dim",
        "squeeze_",
        "squeeze_.dim",
        "transpose_",
        "unsafe_empty_with_format",
        "unsqueeze",
        "unsqueeze_",
        "view",
        "view_as_complex",
        "view_as_real",
    )
)

# torch_npu's autograd kernels of these call a CANN operator directly, past the device kernel. Each
# is made of smaller operators everywhere else in PyTorch.
_COMPOSITE = (
    "aten::fill_diagonal_",
    "aten::max.out",
    "aten::min.out",
    "aten::one_hot",
    "aten::slogdet",
)

# Operators of libraries that are imported later, each made of many small ones: run once on the CPU.
_LATE_OPERATORS = (
    "transformers::grouped_mm_fallback",
    "transformers::grouped_mm_fallback_backward",
)

# Between the graphs of a model that breaks, dynamo watches every Python frame. It has to pass over
# these kernels and what they call, as it does over the C++ ones of an Ascend machine.
_UNTRACED = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)

_libraries: dict[str, torch.library.Library] = {}
_kernels: CpuKernels | None = None


def _register(name: str, kernel: Kernel, key: str = _DEVICE_KEY) -> None:
    """Make `kernel` the kernel of the operator called `name` for dispatch key `key`."""
    namespace, _, rest = name.partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    eval_frame.set_code_exec_strategy(kernel.__code__, _UNTRACED)
    _libraries[namespace].impl(rest, kernel, key, allow_override=True)


def _cpu_kernels() -> CpuKernels:
    if _kernels is None:
        raise RuntimeError("the emulated device has no kernels yet: import moe_graph first")
    return _kernels


def register_cpu_backed(op: torch._ops.OpOverload) -> None:
    """Run `op` on the emulated device by its CPU kernel, as one call over the device's memory.

    For operators made of many others: without this each of those would cross to the CPU by itself.
    """
    _register(op.name(), _cpu_kernels().for_operator(op.name()))


def _missing(name: str) -> Kernel:
    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise MissingKernelError(name)

    return kernel


def _composite(name: str) -> Kernel:
    """The operators that `name` is made of; while a graph is traced, torch_npu's own kernel."""
    traced = torch.library.get_kernel(name, _AUTOGRAD_KEY)

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or current_mode() is not None:
            return traced.call_boxed(torch._C._dispatch_keys(tensor), tensor, *args, **kwargs)
        return find_overload(name).decompose(tensor, *args, **kwargs)

    return kernel


def _registered(key: str) -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def _own_operators() -> list[str]:
    """The operators of this project, which are compositions of many others."""
    importlib.import_module("moe_graph.ops")
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("moe_graph::")]


def _npu_forms() -> dict[str, Callable[..., Any]]:
    """torch_npu's MoE operators, in terms of this project's."""
    forms: dict[str, Callable[..., Any]] = importlib.import_module("moe_graph.ops.npu_forms").FORMS
    return forms


def install() -> None:
    """Register the device's kernels; torch_npu must be loaded. Call once."""
    global _kernels
    allocator = DeviceAllocator()
    _kernels = CpuKernels(allocator)
    own = {
        **eager_aten.KERNELS,
        **eager_npu.KERNELS,
        **eager_attention.KERNELS,
        **{f"npu::{name}": form for name, form in _npu_forms().items()},
    }
    on_cpu = set().union(*(_registered(key) for key in _CPU_KEYS))
    on_device = _registered(_DEVICE_KEY)
    cpu_only = {name for name in _registered("CPU") if name.startswith("aten::")} - on_device

    placed = own.keys() | {"aten::copy_", "aten::empty.memory_format", "aten::empty_strided"}
    for name in (on_device | cpu_only) - placed:
        namespace, _, rest = name.partition("::")
        if namespace not in ("aten", "npu") or rest in _KEPT:
            continue
        if name in on_cpu:
            _register(name, _kernels.for_operator(name))
        else:
            _register(name, _missing(name))
    for name, function in own.items():
        _register(name, _kernels.for_function(function))
    for name in (*_LATE_OPERATORS, *_own_operators()):
        _register(name, _kernels.for_operator(name))
    for name in _COMPOSITE:
        _register(name, _composite(name), _AUTOGRAD_KEY)
    _register("aten::copy_", copy_)
    _register("aten::empty.memory_format", allocator.poisoned_empty)
    _register("aten::empty_strided", allocator.poisoned_empty_strided)
