"""Decides whether to emulate CANN, and loads the stand-in libraries before torch_npu asks for them.

torch_npu is linked against eight CANN libraries by name. Opening the stand-ins by absolute path,
with their symbols global, makes the dynamic loader take them for those names. Nothing here imports
torch: ``import torch`` already loads torch_npu.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import io
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_graph.config import Soc

LIBRARY_DIR = Path(__file__).parent / "lib"
CANN_LIBRARY = "libmoe_graph_cann.so"
SONAMES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
)

# One member of each product family, spelt as aclrtGetSocName does on such a machine.
SOC_NAMES = {Soc.A2: "Ascend910B3", Soc.A3: "Ascend910_9391", Soc.ASCEND950: "Ascend950PR_9599"}

TORCH_NPU_SERIES = "2.13"
MAX_DEVICES = 16


class EmulationError(ImportError):
    """The emulated CANN cannot be loaded; the message says what to change."""


@dataclass(frozen=True)
class Machine:
    """The emulated machine: its product and number of devices."""

    soc: Soc
    devices: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """Read ``MOE_GRAPH_SOC`` (default ``"A2"``) and ``MOE_GRAPH_DEVICES`` (default 1).

        Raises:
            EmulationError: the product is not supported, or the number of devices is not a whole
                number from 1 to 16.
        """
        try:
            soc = Soc.from_environment(environ)
        except ValueError as error:
            raise EmulationError(f"MOE_GRAPH_SOC: {error}") from None
        text = environ.get("MOE_GRAPH_DEVICES", "1").strip()
        if not text.isdecimal() or not 1 <= int(text) <= MAX_DEVICES:
            raise EmulationError(
                f"MOE_GRAPH_DEVICES: got {text!r}, want a whole number from 1 to {MAX_DEVICES}"
            )
        return cls(soc, int(text))


def cann_is_present(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True on a machine with CANN: its environment is set, or its runtime can be loaded."""
    if environ.get("ASCEND_HOME_PATH"):
        return True
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


def should_emulate(environ: Mapping[str, str] = os.environ) -> bool:
    """Return what ``MOE_GRAPH_EMULATE`` says (0 or 1); unset, True where there is no CANN.

    Raises:
        EmulationError: the variable holds anything else.
    """
    wish = environ.get("MOE_GRAPH_EMULATE", "").strip()
    if wish not in ("", "0", "1"):
        raise EmulationError(f"MOE_GRAPH_EMULATE: got {wish!r}, want '0' or '1', or leave it unset")
    return wish == "1" if wish else not cann_is_present(environ)


def check_torch_npu() -> None:
    """Refuse a torch_npu that the stand-in libraries were not written for.

    Raises:
        EmulationError: torch_npu is not installed, or is of another release series.
    """
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        raise EmulationError(
            f"torch_npu is not installed: want torch_npu {TORCH_NPU_SERIES}.*; "
            f"pip install 'torch_npu=={TORCH_NPU_SERIES}.*'"
        ) from None
    if version.split(".")[:2] != TORCH_NPU_SERIES.split("."):
        raise EmulationError(
            f"torch_npu: got version {version}, want {TORCH_NPU_SERIES}.*: the emulated CANN "
            "provides the functions of that release only; "
            f"pip install 'torch_npu=={TORCH_NPU_SERIES}.*'"
        )


def check_no_failed_torch() -> None:
    """Refuse to go on in a process in which ``import torch`` has failed: it cannot be repeated.

    Raises:
        EmulationError: torch was imported before the stand-ins were there, and gave up.
    """
    if "torch._C" in sys.modules and "torch" not in sys.modules:
        raise EmulationError(
            "an earlier `import torch` failed in this process, since torch_npu found no CANN: "
            "import moe_graph before torch and transformers, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or start the script with `python -m moe_graph run`"
        )


def load_libraries(machine: Machine, directory: Path = LIBRARY_DIR) -> ctypes.CDLL:
    """Load the stand-in libraries for `machine` and return the one that holds the functions.

    Raises:
        EmulationError: a library is missing or cannot be loaded.
    """
    libraries = {}
    for name in (CANN_LIBRARY, *SONAMES):
        path = directory / name
        if not path.exists():
            raise EmulationError(
                f"{path} is missing: build it with `pip install -e .` in the moe_graph checkout"
            )
        try:
            libraries[name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise EmulationError(f"{path} cannot be loaded: {error}") from error
    cann = libraries[CANN_LIBRARY]
    cann.moe_graph_cann_configure.argtypes = [ctypes.c_char_p, ctypes.c_int]
    cann.moe_graph_cann_configure.restype = None
    cann.moe_graph_cann_configure(SOC_NAMES[machine.soc].encode(), machine.devices)
    return cann


def settle_torch_npu() -> None:
    """Make torch_npu launch operators at once, not from a queue in a thread of its own.

    An operator without a kernel then fails where it is called, and not some operators later with
    the memory of its result as it was.
    """
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")


@contextlib.contextmanager
def without_cann_warning() -> Iterator[None]:
    """Drop the line that torch_npu prints to stdout on import where there is no CANN."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if not line.startswith("Warning: ASCEND_HOME_PATH environment variable is not set"):
                print(line)


def announce(machine: Machine) -> None:
    """Say in one line on stderr that the stack is emulated, unless ``MOE_GRAPH_QUIET=1``."""
    if os.environ.get("MOE_GRAPH_QUIET") == "1":
        return
    devices = "1 device" if machine.devices == 1 else f"{machine.devices} devices"
    print(
        f"moe_graph: no CANN here, running on the emulated Ascend stack "
        f"({machine.soc.value}, {devices}; MOE_GRAPH_QUIET=1 hides this line)",
        file=sys.stderr,
    )
