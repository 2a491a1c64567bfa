"""Random numbers on the emulated device: drawn by the CPU, from a stream that is the device's own.

An NPU generator holds a seed and an offset. A random operator seeds a CPU generator from the two
and advances the offset. So ``torch.manual_seed`` makes device operators reproducible, saving and
restoring the device's generator replays them (activation checkpointing), and the CPU's own stream
is not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch_npu

_ODD_CONSTANT = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1
_OFFSET_STEP = 4  # the NPU generator keeps its offset a multiple of this


def cpu_generator(
    generator: torch.Generator | None, device: torch.device | None
) -> torch.Generator:
    """Return a CPU generator for one operator that draws from `generator`.

    Args:
        generator: an NPU generator; None is the default one of `device`; a CPU generator is used as
            it is.
        device: device of the operator's output; None is the current device.
    """
    if generator is not None and generator.device.type == "cpu":
        return generator
    if generator is None:
        index = device.index if device is not None else None
        if index is None:
            index = torch_npu.npu.current_device()
        generator = torch_npu.npu.default_generators[index]
    offset = generator.get_offset()
    seed = (generator.initial_seed() * _ODD_CONSTANT + offset) & _SEED_MASK
    generator.set_offset(offset + _OFFSET_STEP)
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def default_stream(device: torch.device | None) -> Iterator[None]:
    """Let CPU operators that take no generator draw from the default generator of `device`."""
    default = torch.default_generator
    before = default.get_state()
    default.set_state(cpu_generator(None, device).get_state())
    try:
        yield
    finally:
        default.set_state(before)
