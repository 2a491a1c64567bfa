"""Layers that permute tokens train through TorchAir, also where rows are left out."""

from __future__ import annotations

import pytest
import torch
import torchair

from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.converters import register_converters

TOP_K, HIDDEN = 2, 6


@pytest.fixture(autouse=True)
def _converters() -> None:
    register_converters()
    torch._dynamo.reset()


@pytest.mark.parametrize("soc", [Soc.A2, Soc.A3])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("num_out_tokens", [0, 9, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_permutation_trains(
    soc: Soc, dynamic: bool, num_out_tokens: int, dtype: torch.dtype
) -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, places = ops.moe_token_permute(x, ids, num_out_tokens)
        return ops.moe_token_unpermute(rows * rows, places, probs)

    compiled = torch.compile(
        layer, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )
    with ops.use_product(soc):
        for tokens in (7, 12) if dynamic else (7,):
            ids = torch.randint(0, 4, (tokens, TOP_K))
            leaves = [torch.randn(tokens, HIDDEN).to(dtype), torch.rand(tokens, TOP_K)]
            gradients = []
            for run, device in ((compiled, "npu"), (layer, "cpu")):
                x, probs = (leaf.to(device, copy=True).requires_grad_() for leaf in leaves)
                run(x, ids.to(device), probs).sum().backward()
                assert x.grad is not None
                assert probs.grad is not None
                gradients.append([x.grad.cpu(), probs.grad.cpu()])
            for got, want in zip(*gradients, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
