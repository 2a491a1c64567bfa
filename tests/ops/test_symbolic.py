"""Shape rules on unknown and symbolic dimensions, and fake kernels under dynamic shapes."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_graph import ops
from moe_graph.ops import OpError, infer_shape
from moe_graph.ops.dims import floordiv, known_less, may_equal, minimum, mul

N, K, H = sympy.symbols("n k h", integer=True, positive=True)
I32 = "int32"


def test_init_routing_of_sympy_dims() -> None:
    shapes = infer_shape("MoeInitRoutingV2", [([N, H], "float32"), ([N, K], I32)], {})
    assert shapes == [(N * K, H), (N * K,), None, None]


def test_active_num_gives_a_minimum() -> None:
    expanded, row_idx, *_ = infer_shape(
        "MoeInitRoutingV2", [([N, 8], "bf16"), ([N, 2], I32)], {"active_num": 10}
    )
    assert expanded == (sympy.Min(10, 2 * N), 8)
    assert row_idx == (2 * N,)


def test_drop_pad_has_no_token_count() -> None:
    shapes = infer_shape(
        "MoeInitRoutingV2",
        [([N, 8], "bf16"), ([N, 2], I32)],
        {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3},
    )
    assert shapes[0] == (4, 3, 8)


def test_known_different_symbols_are_rejected() -> None:
    with pytest.raises(OpError, match=r"expert_idx: got dim 0 n \+ 1, want n"):
        infer_shape("MoeInitRoutingV2", [([N, 8], "bf16"), ([N + 1, 2], I32)], {})


@pytest.mark.parametrize(
    ("x", "ids", "expected"),
    [
        ([-1, 8], [-1, 2], [(-1, 8), (-1,)]),
        ([-1, 8], [5, 2], [(10, 8), (10,)]),
        ([5, -1], [-1, 2], [(10, -1), (10,)]),
        ([-2], [-2], [(-1, -1), (-1,)]),
        ([-2], [5, 2], [(10, -1), (10,)]),
        ([0, 8], [0, 2], [(0, 8), (0,)]),
    ],
)
def test_init_routing_of_unknown_dims(
    x: list[int], ids: list[int], expected: list[tuple[int, ...]]
) -> None:
    shapes = infer_shape("MoeInitRoutingV2", [(x, "float16"), (ids, I32)], {})
    assert shapes[:2] == expected


def test_gradient_has_no_divisibility_check_in_infershape() -> None:
    inputs = [([16, 8], "bf16"), ([16], I32)]
    assert infer_shape("MoeInitRoutingV2Grad", inputs, {"top_k": 6}) == [(2, 8)]


def test_grouped_matmul_of_sympy_dims() -> None:
    inputs = [
        [([N * 4, H], "bfloat16")],
        [([8, H, 32], "bfloat16")],
        *([[]] * 5),
        ([8], "int64"),
    ]
    attrs = {"split_item": 3, "group_type": 0}
    assert infer_shape("GroupedMatmul", inputs, attrs) == [(N * 4, 32)]


def test_missing_and_unknown_attributes() -> None:
    inputs = [([16, 8], "bf16"), ([16], I32)]
    with pytest.raises(OpError, match="top_k: got nothing"):
        infer_shape("MoeInitRoutingV2Grad", inputs, {})
    with pytest.raises(OpError, match="topk: got an attribute of this name"):
        infer_shape("MoeInitRoutingV2Grad", inputs, {"topk": 2})
    with pytest.raises(OpError, match="top_k: got True"):
        infer_shape("MoeInitRoutingV2Grad", inputs, {"top_k": True})


def test_unknown_op_and_dtype() -> None:
    with pytest.raises(OpError, match=r"'MoeNothing', want one of .*MoeInitRoutingV2"):
        infer_shape("MoeNothing", [], {})
    with pytest.raises(OpError, match="dtype: got 'floaty'"):
        infer_shape("SwiGlu", [([2, 2], "floaty")], {})
    with pytest.raises(ValueError, match="unsupported product"):
        infer_shape("SwiGlu", [([2, 2], "bf16")], {}, soc="910")


class Symbols:
    """A fake mode with one dynamic token count."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a fake tensor whose first dim is a symbol, one symbol per size."""
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DUCK] + [DimDynamic.STATIC] * (len(shape) - 1)
        )
        real = torch.zeros(shape, dtype=dtype)
        return self.mode.from_tensor(real, symbolic_context=context)


def test_a_whole_layer_adds_no_guard_on_the_token_count() -> None:
    symbols = Symbols()
    experts, hidden, top_k = 4, 6, 2
    x = symbols.tensor(5, hidden)
    ids = symbols.tensor(5, top_k, dtype=torch.int32)
    scales = symbols.tensor(5, top_k)
    with symbols.mode:
        weight = torch.zeros(experts, hidden, 2 * hidden)
        down = torch.zeros(experts, hidden, hidden)
        expanded, row_idx, cumsum, _ = ops.moe_init_routing(
            x, ids, expert_num=experts, expert_tokens_count_or_cumsum_flag=1
        )
        group_list = cumsum.to(torch.int64)
        inner = ops.swiglu(ops.grouped_matmul(expanded, weight, group_list=group_list))
        rows = ops.grouped_matmul(inner, down, group_list=group_list)
        y = ops.moe_finalize_routing(rows, row_idx, scales=scales, drop_pad_mode=2)
        grad_rows, grad_scales = ops.moe_finalize_routing_grad(y, row_idx, rows, scales)
        grad_x = ops.moe_init_routing_grad(grad_rows, row_idx, top_k)
    tokens = x.shape[0]
    assert str(expanded.shape[0]) == f"2*{tokens}"
    assert str(y.shape[0]) == str(tokens)
    assert str(grad_x.shape[0]) in (str(tokens), f"((2*{tokens})//2)")
    assert tuple(map(str, grad_scales.shape)) == (str(tokens), "2")
    assert symbols.env.guards == []


def test_dim_arithmetic_of_unknown() -> None:
    assert mul(-1, 3) == -1
    assert minimum(-1, 3) == -1
    assert floordiv(-1, 3) == -1
    assert may_equal(-1, 3)
    assert not may_equal(2, 3)
    assert not known_less(-1, 3)


def test_dim_arithmetic_of_sympy() -> None:
    assert floordiv(6 * N, 3) == 2 * N
    assert may_equal(N, K)
    assert not may_equal(N, N + 1)
    assert known_less(N, N + 1)
    assert not known_less(N, K)
