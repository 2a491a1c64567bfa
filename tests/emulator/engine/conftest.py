"""Loads the emulated CANN before torch, and makes `through_torchair` importable."""

from __future__ import annotations

import sys
from pathlib import Path

import moe_graph  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
