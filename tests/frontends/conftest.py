"""Loads moe_graph before torch; every test starts without compiled code."""

import pytest
import torch

import moe_graph  # noqa: F401


@pytest.fixture(autouse=True)
def _fresh_and_seeded() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
