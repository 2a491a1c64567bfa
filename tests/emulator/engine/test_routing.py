"""The ops that have an OpDef, as GE nodes: checks, execution, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ge_graphs import SESSION, add, ge, run_ge, serialise
from through_torchair import assert_same
from torchair._ge_concrete_graph.compat_ir import ge_op
from torchair.ge import attr

from moe_graph.emulator.engine import session
from moe_graph.emulator.engine.errors import GraphError

X = torch.randn(6, 4)
WEIGHT = torch.randn(2, 4, 3)


def grouped(x: Any, weight: Any, ends: Any) -> Any:
    """One product per group of rows of x."""
    nothing: list[Any] = []
    return ge.GroupedMatmul(
        [x], [weight], nothing, nothing, nothing, nothing, nothing, ends, None,
        split_item=3, group_type=0,
    )[0]  # fmt: skip


def init_routing(x: Any, ids: Any) -> Any:
    return ge_op(
        "MoeInitRoutingV2",
        inputs={"x": x, "expert_idx": ids},
        outputs=["expanded_x", "expanded_row_idx", "counts", "before_capacity"],
        attrs={"expert_num": attr.Int(4), "expert_tokens_count_or_cumsum_flag": attr.Int(2)},
    )


def test_rows_beyond_the_last_group_are_poisoned() -> None:
    (y,) = run_ge(grouped, X, WEIGHT, torch.tensor([2, 4]))
    assert_same(y[:4], torch.cat([X[:2] @ WEIGHT[0], X[2:4] @ WEIGHT[1]]))
    assert y[4:].isnan().all()


def test_routing_sorts_rows_by_expert() -> None:
    ids = torch.tensor([[1, 0], [3, 1], [0, 1]], dtype=torch.int32)
    rows, places, counts, unused = run_ge(init_routing, X[:3], ids)
    order = ids.flatten().argsort(stable=True)
    assert_same(rows, X[order // 2])
    assert_same(places.long()[order], torch.arange(6))
    assert_same(counts.long(), torch.bincount(ids.flatten(), minlength=4))
    assert unused.numel() == 0


def test_one_plan_takes_many_token_counts() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int32)
    graph = add(serialise(init_routing, [X[:1], ids], dynamic=True))
    for tokens in (1, 4, 0, 6):
        ids = torch.randint(0, 4, (tokens, 2), dtype=torch.int32)
        rows = session.run(SESSION, graph, [X[:tokens], ids])[0]
        assert_same(rows, X[ids.flatten().argsort(stable=True) // 2])


def test_a_value_out_of_range() -> None:
    with pytest.raises(GraphError, match=r"^GE op GroupedMatmul \(node \w+\): group_list: got "):
        run_ge(grouped, X, WEIGHT, torch.tensor([2, 9]))
    ids = torch.full((3, 2), 7, dtype=torch.int32)
    with pytest.raises(GraphError, match=r"^GE op MoeInitRoutingV2 \(node \w+\): expert_idx: got "):
        run_ge(init_routing, X[:3], ids)


def test_dtypes_follow_the_product() -> None:
    with pytest.raises(
        GraphError, match=r"GroupedMatmul .*weight: got bfloat16, want float32 .*A2"
    ):
        run_ge(grouped, X, WEIGHT.bfloat16(), torch.tensor([2, 4]))


def test_shapes() -> None:
    with pytest.raises(GraphError, match=r"GroupedMatmul .*got .*want"):
        run_ge(grouped, X, WEIGHT[:, :3], torch.tensor([2, 4]))
