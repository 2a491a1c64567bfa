"""Graph-mode compiler plugin for mixture-of-experts layers on Ascend NPUs.

Import it before torch on a machine without CANN: it then loads the emulated Ascend stack, without
which torch_npu cannot be imported.
"""

from moe_graph import emulator

emulated: bool = emulator.activate()
"""True when running without CANN."""

with emulator.importing_torch():
    import torch  # noqa: F401
    import torch_npu  # noqa: F401

emulator.install_eager_kernels()

from moe_graph import ops  # noqa: E402
from moe_graph.backend import npu_backend  # noqa: E402
from moe_graph.config import Config, Soc  # noqa: E402
from moe_graph.explain import explain  # noqa: E402
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
]
__version__ = "0.1.0"
