"""Loads the emulated stack before any test imports torch, and fixes the seeds."""

import os

os.environ.setdefault("MOE_GRAPH_QUIET", "1")

import moe_graph  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("moe_graph", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("moe_graph")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
