"""MoeComputeExpertTokens."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import infer_shape, ops
from moe_graph.ops import OpError
from tests.ops.comparing import assert_same_bits, kernel_and_reference


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-1, 9), max_size=40), st.integers(1, 9))
def test_kernel_is_the_definition(ids: list[int], experts: int) -> None:
    rows = torch.tensor(sorted(ids), dtype=torch.int32)
    (got,), (want,) = kernel_and_reference(
        "MoeComputeExpertTokens", [rows], {"num_experts": experts}
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_counts_are_those_of_bincount(rows: int) -> None:
    ids = torch.randint(0, 7, (rows,)).sort().values
    want = torch.bincount(ids, minlength=7).cumsum(0)
    assert torch.equal(ops.moe_compute_expert_tokens(ids.int(), 7), want.int())


@pytest.mark.parametrize(
    ("ids", "experts", "argument"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), 4, "sorted_experts"),
        (torch.zeros(2), 4, "sorted_experts"),
        (torch.tensor([1, 0], dtype=torch.int32), 4, "sorted_experts"),
        (torch.zeros(2, dtype=torch.int32), 0, "num_experts"),
        (torch.zeros(2, dtype=torch.int32), 2049, "num_experts"),
    ],
)
def test_bad_input_is_refused(ids: torch.Tensor, experts: int, argument: str) -> None:
    with pytest.raises(OpError, match=argument):
        ops.moe_compute_expert_tokens(ids, experts)


@pytest.mark.parametrize("shape", [(-1,), (-2,), (sympy.Symbol("n"),), (3,)])
def test_shapes(shape: tuple[object, ...]) -> None:
    attrs = {"num_experts": 5}
    assert infer_shape("MoeComputeExpertTokens", [(shape, "int32")], attrs) == [(5,)]


def test_opcheck() -> None:
    ids = torch.tensor([0, 1, 1], dtype=torch.int32)
    torch.library.opcheck(torch.ops.moe_graph.moe_compute_expert_tokens, (ids, 3))
