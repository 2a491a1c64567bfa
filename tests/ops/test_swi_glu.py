"""SwiGlu and SwiGluGrad."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import ops
from moe_graph.ops import OpError
from tests.ops.comparing import FLOATS, kernel_and_reference, order_sensitive

# One unit in the last place: exp differs between vectorised and scalar code.
ULP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def _eager(x: torch.Tensor, dim: int) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([0, 2, 4, 6]), min_size=1, max_size=3),
    st.integers(-3, 2),
    st.integers(0, 100),
)
def test_kernels_are_the_definition(shape: list[int], dim: int, seed: int) -> None:
    dim = dim if -len(shape) <= dim < len(shape) else -1
    dtype = FLOATS[seed % 3]
    x = order_sensitive(shape, seed, dtype)
    got, want = kernel_and_reference("SwiGlu", [x], {"dim": dim})
    torch.testing.assert_close(got[0], want[0], rtol=ULP[dtype], atol=1e-6)
    grad = order_sensitive(got[0].shape, seed + 1, dtype)
    got, want = kernel_and_reference("SwiGluGrad", [grad, x], {"dim": dim})
    torch.testing.assert_close(got[0], want[0], rtol=8 * ULP[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_against_float64_eager(dtype: torch.dtype, dim: int) -> None:
    x = order_sensitive((4, 6, 8), 1, dtype).requires_grad_()
    y = ops.swiglu(x, dim)
    wide = x.detach().double().requires_grad_()
    want = _eager(wide, dim)
    torch.testing.assert_close(y.double(), want, rtol=ULP[dtype], atol=1e-6)
    upstream = order_sensitive(y.shape, 2, dtype)
    (y * upstream).sum().backward()
    (want * upstream.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=4 * ULP[dtype], atol=1e-4)


def test_extremes_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, 0.0, 1e4, 1.0, 1.0, 1.0]])
    assert torch.equal(ops.swiglu(x), torch.tensor([[-0.0, 0.0, 1e4]]))


def test_bad_input_is_named() -> None:
    with pytest.raises(OpError, match="x: got 3 in dim 1, want an even size"):
        ops.swiglu(torch.zeros(2, 3))
    with pytest.raises(OpError, match="dim: got 2"):
        ops.swiglu(torch.zeros(2, 4), 2)
    with pytest.raises(OpError, match="x: got float64"):
        ops.swiglu(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(OpError, match="y_grad: got dim 1 3, want 2"):
        torch.ops.moe_graph.swi_glu_grad(torch.zeros(2, 3), torch.zeros(2, 4))
