"""MoeInitRoutingV3 against cases by hand, the definition, PyTorch's sort, and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import OpError, Soc, infer_shape, ops
from moe_graph.ops import find
from moe_graph.ops.defs.support.poison import poisoned
from tests.ops.comparing import assert_same_bits

OPDEF = find("MoeInitRoutingV3")
assert OPDEF is not None

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
IDS = torch.tensor([[2, 0], [1, 2], [0, 5]], dtype=torch.int32)
UNWRITTEN = int(poisoned((1,), torch.int32, torch.device("cpu")))


def test_a_range_routes_only_its_experts() -> None:
    rows, row_idx, counts, scale = ops.moe_init_routing(
        X, IDS, expert_num=6, expert_tokens_num_type=1, active_expert_range=(1, 3)
    )
    assert rows[:3].tolist() == [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    assert rows[3:].isnan().all()
    assert row_idx.tolist() == [1, -1, 0, 2, -1, -1]
    assert counts.tolist() == [1, 2]
    assert scale.isnan().all()


def test_the_copy_of_each_row_and_key_values() -> None:
    _, row_idx, counts, scale = ops.moe_init_routing(
        X,
        IDS,
        scale=torch.tensor([10.0, 20.0, 30.0]),
        expert_num=6,
        expert_tokens_num_type=2,
        active_expert_range=(0, 3),
        row_idx_type=1,
    )
    assert row_idx.tolist() == [1, 4, 2, 0, 3, UNWRITTEN]
    assert counts[:4].tolist() == [[0, 2], [1, 1], [2, 2], [0, 0]]
    assert (counts[4:] == poisoned((1,), torch.int64, counts.device)).all()
    assert scale[:5].tolist() == [10.0, 30.0, 20.0, 10.0, 20.0]
    assert scale[5:].isnan().all()


def test_running_sums() -> None:
    counts = ops.moe_init_routing(X, IDS, expert_num=6, expert_tokens_num_type=0)[2]
    assert counts.tolist() == [2, 3, 5, 5, 5, 6]
    assert counts.dtype is torch.int64


def test_static_quantisation_rounds_to_even_and_saturates() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, 1000.0, -1000.0, float("nan")]])
    rows, _, _, scale = ops.moe_init_routing(
        x,
        torch.tensor([[0]], dtype=torch.int32),
        scale=torch.tensor([1.0]),
        offset=torch.tensor([0.0]),
        expert_num=1,
        quant_mode=0,
    )
    assert rows.dtype is torch.int8
    assert rows.tolist() == [[0, 2, 2, 0, 127, -128, 0]]
    assert scale.shape == (0,)


def test_dynamic_quantisation_divides_by_the_scale() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    rows, _, _, scale = ops.moe_init_routing(
        x, torch.tensor([[0], [1]], dtype=torch.int32), expert_num=2, quant_mode=1
    )
    assert torch.equal(scale, torch.tensor([2.0, 0.0]) / 127)
    assert rows.tolist() == [[64, -127, 32], [0, 0, 0]]


def test_smoothing_factors_belong_to_active_experts() -> None:
    smooth = torch.tensor([[1.0, 10.0], [1.0, 1.0]])
    rows, *_, scale = ops.moe_init_routing(
        X, IDS, scale=smooth, expert_num=6, quant_mode=1, active_expert_range=(1, 3)
    )
    assert scale[:3].tolist() == torch.tensor([40 / 127, 2 / 127, 4 / 127]).tolist()
    assert rows[0].tolist() == [round(3 / (40 / 127)), 127]


def test_drop_pad_drops_and_pads() -> None:
    ids = torch.tensor([[0], [0], [2]], dtype=torch.int32)
    rows, row_idx, counts, _ = ops.moe_init_routing(
        X,
        ids,
        expert_num=3,
        expert_capacity=1,
        drop_pad_mode=1,
        expert_tokens_num_type=1,
    )
    assert rows.tolist() == [[[1.0, 2.0]], [[0.0, 0.0]], [[5.0, 6.0]]]
    assert row_idx.tolist() == [0, -1, 2]
    assert counts.tolist() == [2, 0, 1]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    """Inputs and attributes of one call on A2."""
    tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    hidden, experts = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.randint(0, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        ids.fill_(experts - 1)
    quant_mode = draw(st.sampled_from([-1, 0, 1]))
    dtypes = [torch.float16, torch.bfloat16, torch.float32] + [torch.int8] * (quant_mode == -1)
    dtype = draw(st.sampled_from(dtypes))
    x = (torch.randn(tokens, hidden, generator=generator) * 5).to(dtype)
    drop_pad = tokens > 0 and draw(st.booleans())
    start = 0 if drop_pad else draw(st.integers(0, experts - 1))
    end = experts if drop_pad else draw(st.integers(start + 1, experts))
    scale = offset = None
    if quant_mode == 0:
        scale, offset = torch.tensor([3.7]), torch.tensor([0.25])
    elif draw(st.booleans()):
        shapes = {-1: [tokens], 1: [draw(st.sampled_from([1, end - start])), hidden]}
        scale = torch.rand(shapes[quant_mode], generator=generator)
    attrs = {
        "active_num": draw(st.sampled_from([-1, 0, 1, 3, 100])),
        "expert_capacity": draw(st.integers(1, tokens)) if drop_pad else -1,
        "expert_num": experts,
        "drop_pad_mode": int(drop_pad),
        "expert_tokens_num_type": 1 if drop_pad else draw(st.integers(0, 2)),
        "expert_tokens_num_flag": draw(st.booleans()),
        "quant_mode": quant_mode,
        "active_expert_range": [start, end],
        "row_idx_type": 0 if drop_pad else draw(st.integers(0, 1)),
    }
    return [x, ids, scale, offset], attrs


@settings(max_examples=300, deadline=None)
@given(calls())
def test_the_kernel_is_the_definition(call: tuple[list[Any], dict[str, Any]]) -> None:
    inputs, given_attrs = call
    assert OPDEF is not None
    attrs = OPDEF.bind_attrs(given_attrs)
    specs = OPDEF.infer([None if t is None else ops.TensorSpec.of(t) for t in inputs], attrs)
    for spec, got, want in zip(
        specs, OPDEF.kernel(inputs, attrs), OPDEF.reference(inputs, attrs), strict=True
    ):
        if spec is None:
            assert got is None
            assert want is None
            continue
        assert got is not None
        assert want is not None
        assert tuple(got.shape) == spec.shape
        assert got.dtype == spec.dtype
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"active_num": 3},
        {"active_expert_range": (1, 3)},
        {"active_expert_range": (1, 3), "active_num": 2},
        {"drop_pad_mode": 1, "expert_capacity": 1},
    ],
)
def test_the_gradient_is_that_of_indexing(arguments: dict[str, Any]) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    ids = torch.tensor([[2, 0], [1, 2], [0, 3], [1, 1], [3, 0]], dtype=torch.int32)
    rows, row_idx, *_ = ops.moe_init_routing(
        x, ids, expert_num=4, expert_tokens_num_type=1, **arguments
    )
    flat = rows.reshape(-1, 3)
    weight = torch.randn(flat.shape)
    written = (row_idx >= 0) & (row_idx < flat.shape[0])
    places = row_idx[written].long()
    # Rows that no copy fills are left out of the sum: unwritten, or constant zero.
    (flat[places] * weight[places]).sum().backward()
    exact = torch.zeros(5, 3, dtype=torch.float64)
    tokens = torch.arange(10) // 2
    exact.index_add_(0, tokens[written], weight[places].double())
    torch.testing.assert_close(x.grad, exact.float())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"quant_mode": -1, "scale": torch.ones(3)}, "scale"),
        ({"row_idx_type": 1}, "row_idx_type"),
    ],
)
def test_features_without_gradient_say_so(arguments: dict[str, Any], reason: str) -> None:
    x = X.clone().requires_grad_()
    rows = ops.moe_init_routing(x, IDS, expert_num=6, **arguments)[0]
    with pytest.raises(NotImplementedError, match=reason):
        rows.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"expert_num": 0, "quant_mode": 1}, "expert_num"),
        ({"active_expert_range": (3, 3)}, "active_expert_range"),
        ({"active_expert_range": (0, 9)}, "active_expert_range"),
        ({"expert_tokens_num_type": 3}, "expert_tokens_num_type"),
        ({"quant_mode": 10}, "quant_mode"),
        ({"quant_mode": 2}, "quant_mode"),
        ({"quant_mode": 0}, "scale"),
        ({"quant_mode": 0, "scale": torch.ones(1)}, "offset"),
        ({"quant_mode": 1, "scale": torch.ones(2, 2)}, "scale"),
        ({"quant_mode": 1, "scale": torch.ones(1, 3)}, "scale"),
        ({"scale": torch.ones(4)}, "scale"),
        ({"row_idx_type": 2}, "row_idx_type"),
        (
            {"drop_pad_mode": 1, "expert_capacity": 1, "active_expert_range": (0, 2)},
            "active_expert_range",
        ),
        ({"drop_pad_mode": 1, "expert_capacity": 9, "quant_mode": 1}, "expert_capacity"),
        (
            {"expert_tokens_num_type": 1, "expert_tokens_count_or_cumsum_flag": 2},
            "expert_tokens_num_type",
        ),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(OpError) as raised:
        ops.moe_init_routing(X, IDS, **({"expert_num": 6} | arguments))
    assert raised.value.op == "MoeInitRoutingV3"
    assert raised.value.argument == argument


def test_950_wants_counts_and_takes_modes_whose_values_are_not_computed() -> None:
    inputs = [([8, 256], "float16"), ([8, 2], "int32")]
    attrs = {"expert_num": 4, "quant_mode": 2, "expert_tokens_num_flag": True}
    shapes = infer_shape("MoeInitRoutingV3", inputs, attrs, "950")
    assert shapes == [(16, 256), (16,), (4,), (16, 8)]
    with ops.use_product(Soc.ASCEND950):
        with pytest.raises(OpError, match="values"):
            ops.moe_init_routing(
                X.half(), IDS, expert_num=6, quant_mode=2, expert_tokens_num_type=1
            )
        with pytest.raises(OpError, match="expert_tokens_num_flag"):
            ops.moe_init_routing(X, IDS, expert_num=6, active_expert_range=(0, 3))


def test_unknown_and_symbolic_sizes() -> None:
    attrs = {"expert_num": 4, "active_expert_range": [0, 2], "active_num": 7}
    unknown = infer_shape("MoeInitRoutingV3", [([-2], "float16"), ([-2], "int32")], attrs)
    assert unknown == [(-1, -1), (-1,), None, (-1,)]
    tokens = sympy.Symbol("T", integer=True, positive=True)
    symbolic = infer_shape(
        "MoeInitRoutingV3", [([tokens, 16], "float16"), ([tokens, 2], "int32")], attrs
    )
    assert symbolic == [
        (sympy.Min(7, 2 * tokens), 16),
        (2 * tokens,),
        None,
        (sympy.Min(7, 2 * tokens),),
    ]


def test_opcheck() -> None:
    ids = torch.randint(0, 4, (4, 2), dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.moe_graph.moe_init_routing_v3,
        (torch.randn(4, 8), ids, torch.rand(4)),
        {"expert_num": 4, "expert_tokens_num_flag": True},
    )
