"""An Ascend machine without the hardware: stand-in CANN libraries, a GE engine, eager kernels.

:func:`activate` comes before ``import torch`` and uses the standard library only. After torch and
torch_npu are there, :func:`install_eager_kernels` gives the emulated device its operators.
"""

from __future__ import annotations

import contextlib
import threading

from moe_graph.emulator import loader
from moe_graph.emulator.loader import EmulationError

__all__ = [
    "EmulationError",
    "activate",
    "emulated",
    "importing_torch",
    "install_eager_kernels",
]

emulated: bool = False
"""True when this process runs on the emulated CANN."""

_decided = False
_eager_installed = False
_lock = threading.Lock()


def activate() -> bool:
    """Load the emulated CANN where there is no real one; later calls change nothing.

    Returns:
        True when emulating.

    Raises:
        EmulationError: a setting is wrong, torch_npu is missing or of another version, or the
            stand-in libraries are not built.
    """
    global emulated, _decided
    with _lock:
        if not _decided:
            if loader.should_emulate():
                loader.check_no_failed_torch()
                loader.check_torch_npu()
                machine = loader.Machine.from_environment()
                library = loader.load_libraries(machine)
                from moe_graph.emulator import bridge

                bridge.connect(library)
                loader.settle_torch_npu()
                loader.announce(machine)
                emulated = True
            _decided = True
    return emulated


def importing_torch() -> contextlib.AbstractContextManager[None]:
    """Return the context to import torch and torch_npu in; it hides that CANN is missing."""
    return loader.without_cann_warning() if emulated else contextlib.nullcontext()


def install_eager_kernels() -> None:
    """Register the kernels of the emulated device; needs torch_npu loaded; once per process."""
    global _eager_installed
    with _lock:
        if emulated and not _eager_installed:
            from moe_graph.emulator import eager

            eager.install()
            _eager_installed = True
