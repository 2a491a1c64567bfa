"""MoeReRouting."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import infer_shape, ops
from moe_graph.config import Soc
from moe_graph.ops import OpError
from moe_graph.ops.product import use_product
from tests.ops.comparing import assert_same_bits, kernel_and_reference

ROWS = (torch.float16, torch.bfloat16, torch.int8)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(ROWS),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([None, (), (2,)]),
    st.sampled_from([0, 1]),
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    ranks: int,
    experts: int,
    most: int,
    spare: int,
    hidden: int,
    dtype: torch.dtype,
    count_dtype: torch.dtype,
    scale_shape: tuple[int, ...] | None,
    idx_type: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (ranks, experts), generator=generator).to(count_dtype)
    rows = int(counts.sum()) + spare
    tokens = torch.randint(-9, 9, (rows, hidden), generator=generator).to(dtype)
    scales = None
    if scale_shape is not None:
        scales = torch.randn(rows, *scale_shape, generator=generator)
    got, want = kernel_and_reference(
        "MoeReRouting", [tokens, counts, scales], {"idx_type": idx_type}, Soc.ASCEND950
    )
    for kernel, reference in zip(got, want, strict=True):
        assert_same_bits(kernel, reference)


def test_by_hand() -> None:
    tokens = torch.tensor([[1], [2], [3], [4], [5]], dtype=torch.float16)
    counts = torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
    rows, scales, index, total = ops.moe_re_routing(tokens, counts, tokens[:, 0].float())
    assert rows.flatten().tolist() == [1, 4, 5, 2, 3]
    assert scales.tolist() == [1, 4, 5, 2, 3]
    assert index.tolist() == [0, 3, 4, 1, 2]
    assert total.tolist() == [3, 2]
    with use_product(Soc.ASCEND950):
        index = ops.moe_re_routing(tokens, counts, idx_type=1)[2]
    assert index.tolist() == [0, 3, 4, 1, 2]


def test_scatter_is_the_inverse_of_gather() -> None:
    counts = torch.tensor([[1, 2, 0], [0, 3, 1], [2, 2, 2]])
    tokens = torch.arange(13, dtype=torch.float16).unsqueeze(1)
    with use_product(Soc.ASCEND950):
        gather = ops.moe_re_routing(tokens, counts)[2]
        scatter = ops.moe_re_routing(tokens, counts, idx_type=1)[2]
    assert torch.equal(gather.argsort(), scatter.long())


def test_rows_of_nobody_are_unwritten() -> None:
    counts = torch.ones(1, 1, dtype=torch.int32)
    rows, scales, index, _ = ops.moe_re_routing(torch.ones(3, 2, dtype=torch.float16), counts)
    assert rows.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert scales.isnan().all()
    assert index[0] == 0
    assert (index[1:] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_narrow_floats_move_as_bytes(dtype: torch.dtype) -> None:
    data = torch.arange(12, dtype=torch.uint8).view(4, 3)
    counts = torch.tensor([[1, 1], [1, 1]], dtype=torch.int32)
    scales = torch.arange(8, dtype=torch.uint8).view(4, 2)
    with use_product(Soc.ASCEND950):
        rows, moved, *_ = ops.moe_re_routing(
            data.view(dtype), counts, scales.view(torch.float8_e8m0fnu)
        )
    order = [0, 2, 1, 3]
    assert torch.equal(rows.view(torch.uint8), data[order])
    assert torch.equal(moved.view(torch.uint8), scales[order])


@pytest.mark.parametrize(
    ("changed", "attrs", "argument"),
    [
        ({"tokens": torch.ones(4)}, {}, "tokens"),
        ({"tokens": torch.ones(4, 2)}, {}, "tokens"),
        ({"tokens": torch.ones(4, 16384, dtype=torch.float16)}, {}, "tokens"),
        ({"counts": torch.ones(4, dtype=torch.int32)}, {}, "expert_token_num_per_rank"),
        ({"counts": torch.full((2, 2), 3)}, {}, "expert_token_num_per_rank"),
        ({"counts": torch.full((2, 2), -1)}, {}, "expert_token_num_per_rank"),
        ({"scales": torch.ones(3)}, {}, "per_token_scales"),
        ({"scales": torch.tensor(1.0)}, {}, "per_token_scales"),
        ({}, {"idx_type": 1}, "idx_type"),
        ({}, {"expert_token_num_type": 0}, "expert_token_num_type"),
    ],
)
def test_bad_input_is_refused(
    changed: dict[str, torch.Tensor], attrs: dict[str, Any], argument: str
) -> None:
    given = {
        "tokens": torch.ones(4, 2, dtype=torch.float16),
        "counts": torch.ones(2, 2, dtype=torch.int32),
        "scales": torch.ones(4),
    } | changed
    with use_product(Soc.A2), pytest.raises(OpError, match=argument):
        ops.moe_re_routing(*given.values(), **attrs)


def test_symbolic_shapes() -> None:
    rows, experts = sympy.symbols("a e", positive=True, integer=True)
    inputs = [((rows, 8), "int8"), ((2, experts), "int64")]
    assert infer_shape("MoeReRouting", inputs, {}) == [(rows, 8), (rows,), (rows,), (experts,)]
    inputs = [((-2,), "int8"), ((-2,), "int64")]
    assert infer_shape("MoeReRouting", inputs, {}) == [(-2,), (-1,), (-1,), (-1,)]


def test_opcheck() -> None:
    tokens = torch.ones(3, 2, dtype=torch.float16)
    counts = torch.tensor([[1, 2]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.moe_graph.moe_re_routing, (tokens, counts, torch.ones(3)))
