"""CPU tensors over the memory of the emulated device, and device tensors with a CPU result in them.

"Device memory" is host memory (``cann/device_memory.cpp``), so an NPU tensor and a CPU tensor can
lie over the same bytes. ::

    npu tensor --cpu_view--> cpu tensor, same storage --op--> cpu result --to_device--> npu tensor
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CPU = torch.device("cpu")

_CACHE_LIMIT = 8192

# (address, bytes, dtype) -> flat CPU tensor over that memory. It owns nothing and is only read
# while an NPU tensor over the same memory is alive, so an entry may outlive its allocation.
_flat_views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same sizes, strides and memory as the NPU `tensor`."""
    storage = tensor.untyped_storage()
    key = (storage.data_ptr(), storage.nbytes(), tensor.dtype)
    flat = _flat_views.get(key)
    if flat is None:
        if len(_flat_views) >= _CACHE_LIMIT:
            _flat_views.clear()
        flat = torch.empty(0, dtype=key[2])
        if key[1]:
            memory = torch._C._construct_storage_from_data_pointer(key[0], CPU, key[1])
            flat.set_(memory, 0, (key[1] // key[2].itemsize,), (1,))
        _flat_views[key] = flat
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten::copy_``: to, from, within and between devices, and between dtypes."""
    destination = target if target.is_cpu else cpu_view(target)
    destination.copy_(source if source.is_cpu else cpu_view(source))
    return target


class DeviceAllocator:
    """Makes device tensors through torch_npu's own kernels, which the poisoning ones replace."""

    def __init__(self) -> None:
        key = torch._C.DispatchKey.PrivateUse1
        self._keys = torch._C.DispatchKeySet(key)
        self._empty = torch.library.get_kernel("aten::empty.memory_format", "PrivateUse1")
        self._empty_strided = torch.library.get_kernel("aten::empty_strided", "PrivateUse1")

    def poisoned_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``aten::empty.memory_format`` on the device, filled with NaN."""
        return poison(self._empty.call_boxed(self._keys, *args, **kwargs))

    def poisoned_empty_strided(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``aten::empty_strided`` on the device, filled with NaN."""
        return poison(self._empty_strided.call_boxed(self._keys, *args, **kwargs))

    def to_device(self, result: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a device tensor of the sizes, strides and elements of the CPU `result`."""
        target: torch.Tensor = self._empty_strided.call_boxed(
            self._keys, result.shape, result.stride(), dtype=result.dtype, device=device
        )
        source, memory = result.untyped_storage(), target.untyped_storage()
        if result.storage_offset() == 0 and source.nbytes() == memory.nbytes():
            if source.nbytes():
                ctypes.memmove(memory.data_ptr(), source.data_ptr(), source.nbytes())
        else:
            cpu_view(target).copy_(result)
        return target


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill fresh device memory with 0xFF bytes: NaN in every floating dtype, -1 in signed ints."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
    return tensor
