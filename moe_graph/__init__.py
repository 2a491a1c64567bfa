"""Graph-mode compiler plugin for mixture-of-experts layers on Ascend NPUs.

Import it before torch on a machine without CANN: it then loads the emulated Ascend stack, without
which torch_npu cannot be imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from moe_graph import emulator

if TYPE_CHECKING:
    from moe_graph.backend import npu_backend
    from moe_graph.frontends.preparation import preparation, prepare, unprepare
    from moe_graph.inspection import explain

emulated: bool = emulator.activate()
"""True when running without CANN."""

with emulator.importing_torch():
    import torch  # noqa: F401
    import torch_npu  # noqa: F401

emulator.install_eager_kernels()

from moe_graph import ops  # noqa: E402
from moe_graph.config import Config, Soc  # noqa: E402
from moe_graph.ops import OpError, infer_shape  # noqa: E402
from moe_graph.report import KeptLayerError, LayerReport, Reason, Report  # noqa: E402

__all__ = [
    "Config",
    "KeptLayerError",
    "LayerReport",
    "OpError",
    "Reason",
    "Report",
    "Soc",
    "emulated",
    "explain",
    "infer_shape",
    "npu_backend",
    "ops",
    "preparation",
    "prepare",
    "unprepare",
]
__version__ = "0.1.0"

# These need torch._dynamo, which takes longer to import than everything else here together.
_ON_FIRST_USE = {
    "explain": "moe_graph.inspection",
    "npu_backend": "moe_graph.backend",
    "preparation": "moe_graph.frontends.preparation",
    "prepare": "moe_graph.frontends.preparation",
    "unprepare": "moe_graph.frontends.preparation",
}


def __getattr__(name: str) -> Any:
    """Import a public name that is listed above on its first use."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    globals()[name] = value
    return value
