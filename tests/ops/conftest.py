"""Loads moe_graph before the test modules import torch, as a machine without CANN needs."""

import moe_graph  # noqa: F401
