"""MoeFinalizeRouting, the first version."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph.config import Soc
from moe_graph.ops import OpError, find, infer_shape
from moe_graph.ops.torch_binding import specs_of
from tests.ops.comparing import (
    FLOATS,
    assert_same_bits,
    kernel_and_reference,
    order_sensitive,
    routing,
)

OP = "MoeFinalizeRouting"
EXPERTS = 4


def _inputs(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    copies = tokens * top_k
    return {
        "expanded_x": order_sensitive((copies, hidden), seed, dtype),
        "x1": order_sensitive((tokens, hidden), seed + 1, dtype),
        "x2": order_sensitive((tokens, hidden), seed + 2, dtype) if seed % 2 else None,
        "bias": order_sensitive((EXPERTS, hidden), seed + 3, dtype),
        "scales": order_sensitive((tokens, top_k), seed + 4, dtype),
        "expanded_row_idx": torch.randperm(copies, generator=generator).to(torch.int32),
        "expanded_expert_idx": routing(tokens, top_k, EXPERTS, seed),
    }


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([1, 2, 3, EXPERTS]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(FLOATS),
    st.sampled_from([Soc.A2, Soc.A3]),
    st.integers(0, 1000),
)
def test_kernel_is_the_definition(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, soc: Soc, seed: int
) -> None:
    inputs = list(_inputs(tokens, top_k, hidden, dtype, seed).values())
    got, want = kernel_and_reference(OP, inputs, {}, soc)
    assert_same_bits(got[0], want[0])


def test_the_example_of_the_formula() -> None:
    rows = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    y = torch.ops.moe_graph.moe_finalize_routing(
        rows,
        torch.tensor([[0.5], [0.25]]),
        None,
        torch.tensor([[2.0], [3.0]]),
        torch.tensor([[1.0, 2.0], [1.0, 4.0]]),
        # column order: copies (0, 0), (1, 0), (0, 1), (1, 1)
        torch.tensor([2, 0, 3, 1], dtype=torch.int32),
        torch.tensor([[0, 1], [1, 0]], dtype=torch.int32),
    )
    assert y.tolist() == [[0.5 + 102 + 2 * 1003], [0.25 + 4 + 4 * 12]]


def test_fp16_is_summed_in_fp16() -> None:
    y = torch.ops.moe_graph.moe_finalize_routing(
        torch.ones(2, 1, dtype=torch.float16),
        torch.full((1, 1), 2048, dtype=torch.float16),
        None,
        torch.zeros(1, 1, dtype=torch.float16),
        torch.ones(1, 2, dtype=torch.float16),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32),
    )
    assert y.item() == 2048


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x1": torch.ones(5, 8)}, "x1"),
        ({"x2": torch.ones(6, 9)}, "x2"),
        ({"bias": torch.ones(4, 9)}, "bias"),
        ({"scales": torch.ones(6, 2)}, "expanded_expert_idx"),
        ({"scales": torch.ones(6, 3, dtype=torch.bfloat16)}, "scales"),
        ({"expanded_row_idx": torch.zeros(18, 1, dtype=torch.int32)}, "expanded_row_idx"),
        ({"expanded_row_idx": torch.full((18,), 18, dtype=torch.int32)}, "expanded_row_idx"),
        ({"expanded_row_idx": torch.full((18,), -1, dtype=torch.int32)}, "expanded_row_idx"),
        ({"expanded_expert_idx": torch.full((6, 3), 4, dtype=torch.int32)}, "expanded_expert_idx"),
    ],
)
def test_bad_input(change: dict[str, Any], argument: str) -> None:
    inputs = list((_inputs(6, 3, 8, torch.float32, seed=1) | change).values())
    with pytest.raises(OpError) as caught:
        torch.ops.moe_graph.moe_finalize_routing(*inputs)
    assert (caught.value.op, caught.value.argument) == (OP, argument)
    assert caught.value.got
    assert caught.value.want


def test_950_has_only_the_second_version() -> None:
    opdef = find(OP)
    assert opdef is not None
    inputs = specs_of(list(_inputs(6, 3, 8, torch.float32, seed=1).values()))
    with pytest.raises(OpError, match="want an op of 950"):
        opdef.infer(inputs, {}, Soc.ASCEND950)


def test_no_gradient() -> None:
    inputs = list(_inputs(6, 3, 8, torch.float32, seed=1).values())
    assert inputs[0] is not None
    y = torch.ops.moe_graph.moe_finalize_routing(inputs[0].requires_grad_(), *inputs[1:])
    with pytest.raises(NotImplementedError, match="moe_finalize_routing computes the same"):
        y.sum().backward()


def test_shapes_in_symbols_and_unknown() -> None:
    tokens, hidden = sympy.symbols("t h", integer=True, positive=True)

    def shape(*dims: Any) -> tuple[list[Any], str]:
        return list(dims), "float32"

    def index(*dims: Any) -> tuple[list[Any], str]:
        return list(dims), "int32"

    rest = [shape(3, hidden), shape(tokens, 2), index(2 * tokens), index(tokens, 2)]
    inputs = [shape(2 * tokens, hidden), shape(tokens, hidden), None, *rest]
    assert infer_shape(OP, inputs, {}) == [(tokens, hidden)]
    inputs[1] = shape(-1, 8)
    assert infer_shape(OP, inputs, {}) == [(-1, -1)]
    inputs[1] = shape(-2)
    assert infer_shape(OP, inputs, {}) == [(-2,)]
