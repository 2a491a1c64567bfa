"""Eager calls hold little beside their inputs and outputs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peak_memory import peak_bytes
from benchmarks.routing_cases import CASES, TOP_K

TOKENS, HIDDEN = 4096, 512
PARTS = 4 << 20  # buffers of the part that is worked on, whatever the number of tokens
BYTES_PER_COPY = 16


@pytest.mark.parametrize("name", CASES)
def test_an_eager_call_is_lean(name: str) -> None:
    case = CASES[name](TOKENS, HIDDEN)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            outputs = sum(tensor.untyped_storage().nbytes() for tensor in case.ours())
            peak = peak_bytes(case.ours)
    finally:
        torch.set_num_threads(threads)
    assert peak - outputs <= BYTES_PER_COPY * TOKENS * TOP_K + PARTS
