"""MoeUpdateExpert."""

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
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference


def _table(experts: int, width: int, generator: torch.Generator) -> torch.Tensor:
    count = torch.randint(1, width, (experts, 1), generator=generator)
    ranks = torch.randint(0, 8, (experts, width - 1), generator=generator)
    return torch.cat([count, ranks], 1).int()


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([1, 2, 7]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([2, 3, 6]),
    st.sampled_from([0, 1]),
    st.integers(0, 7),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([None, *FLOATS]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    tokens: int,
    top_k: int,
    width: int,
    balance_mode: int,
    rank: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype | None,
    masked: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (tokens, top_k), generator=generator).to(dtype)
    inputs: list[Any] = [ids, _table(9, width, generator)]
    if scale_dtype is not None:
        scales = torch.rand(tokens, top_k, generator=generator).to(scale_dtype)
        inputs += [scales, torch.rand(top_k, generator=generator) / 4]
        inputs += [torch.rand(tokens, generator=generator) > 0.3] if masked else []
    attrs = {"local_rank_id": rank, "world_size": 8, "balance_mode": balance_mode}
    got, want = kernel_and_reference("MoeUpdateExpert", inputs, attrs, Soc.A3)
    for kernel, reference in zip(got, want, strict=True):
        assert_same_bits(kernel, reference)


TABLE = torch.tensor([[1, 5, 0, 0], [2, 3, 4, 0], [3, 1, 2, 6]], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [2, 1], [2, 0], [1, 2]], dtype=torch.int32)


@pytest.mark.parametrize(("rank", "want"), [(0, [5, 3, 1]), (3, [5, 3, 2]), (7, [5, 4, 6])])
def test_instances_by_rank(rank: int, want: list[int]) -> None:
    with use_product(Soc.A3):
        ids, _ = ops.moe_update_expert(IDS, TABLE, local_rank_id=rank, world_size=8)
    assert torch.equal(ids, torch.tensor(want, dtype=torch.int32)[IDS])


def test_instances_by_token_and_pruning() -> None:
    scales = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 0.0], [1.0, 1.0]])
    with use_product(Soc.A3):
        ids, mask = ops.moe_update_expert(
            IDS,
            TABLE,
            expert_scales=scales,
            pruning_threshold=torch.tensor([[0.5, 0.25]]),
            active_mask=torch.tensor([True, True, True, False]),
            balance_mode=1,
        )
    assert ids.tolist() == [[5, 3], [2, 4], [6, 5], [4, 1]]
    assert mask.tolist() == [[True, True], [True, True], [True, False], [False, False]]


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"expert_ids": IDS + 1}, "expert_ids"),
        ({"expert_ids": IDS[0]}, "expert_ids"),
        ({"expert_ids": IDS[:, :0]}, "expert_ids"),
        ({"eplb_table": TABLE * 0}, "eplb_table"),
        ({"eplb_table": TABLE[:, :1]}, "eplb_table"),
        ({"expert_scales": torch.ones(4, 2)}, "pruning_threshold"),
        ({"pruning_threshold": torch.ones(2)}, "expert_scales"),
        ({"active_mask": torch.ones(4, dtype=torch.bool)}, "expert_scales"),
        ({"local_rank_id": 8}, "local_rank_id"),
        ({"world_size": 1, "local_rank_id": 0}, "world_size"),
        ({"balance_mode": 2}, "balance_mode"),
        (
            {"expert_scales": torch.ones(4, 2), "pruning_threshold": torch.ones(2, 2)},
            "pruning_threshold",
        ),
        ({"expert_scales": torch.ones(4, 1), "pruning_threshold": torch.ones(2)}, "expert_scales"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], argument: str) -> None:
    given = {"expert_ids": IDS, "eplb_table": TABLE, "local_rank_id": 0, "world_size": 8}
    with use_product(Soc.A3), pytest.raises(OpError, match=argument):
        ops.moe_update_expert(**(given | changed))


def test_a2_has_no_such_op() -> None:
    with use_product(Soc.A2), pytest.raises(OpError, match="an op of A2"):
        ops.moe_update_expert(IDS, TABLE, local_rank_id=0, world_size=8)


@pytest.mark.parametrize("tokens", [-1, sympy.Symbol("t"), 4])
def test_shapes(tokens: object) -> None:
    inputs = [((tokens, 2), "int64"), ((3, 4), "int32")]
    assert infer_shape("MoeUpdateExpert", inputs, {}) == [(tokens, 2)] * 2
