"""Graph-mode compiler plugin for mixture-of-experts layers on Ascend NPUs."""

from moe_graph import emulator

emulated: bool = emulator.activate()
"""True when running without CANN."""

import torch  # noqa: E402, F401
import torch_npu  # noqa: E402, F401

emulator.install_eager_kernels()
