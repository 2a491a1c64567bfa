"""Both kinds of GELU and their gradients through TorchAir and the engine, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import moe_graph

X = torch.linspace(-6.0, 6.0, 4097).view(17, 241)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_the_kind_that_was_asked_for(approximate: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functional.gelu, backend=moe_graph.npu_backend())
    x = X.to(dtype, copy=True).requires_grad_()
    x_npu = x.detach().npu().requires_grad_()
    want, got = (
        functional.gelu(x, approximate=approximate),
        compiled(x_npu, approximate=approximate),
    )
    want.backward(torch.ones_like(want))
    got.backward(torch.ones_like(got))
    torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(x_npu.grad.cpu(), x.grad)


def test_the_kinds_differ_by_more_than_the_tolerance() -> None:
    exact, other = functional.gelu(X), functional.gelu(X, approximate="tanh")
    assert (exact - other).abs().max() > 1e-4
