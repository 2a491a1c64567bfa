"""Every test starts without graphs of an earlier one."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _no_graphs_of_other_files() -> None:
    torch._dynamo.reset()
