"""Every MoE family of transformers, compiled for the emulated NPU: ``python -m tests.zoo``."""

import moe_graph  # noqa: F401  before torch, where no CANN is installed
