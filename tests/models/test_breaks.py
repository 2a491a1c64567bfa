"""A model that dynamo breaks into several graphs: what lies between them runs eagerly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import moe_graph
from tests.models.blocks import moe_block, tokens


@torch.compiler.disable
def _not_traced(x: Tensor) -> Tensor:
    return x[:, torch.nonzero(x.abs().sum((0, 2)))[:, 0]].tanh()


class _Broken(nn.Module):
    """Two MoE blocks with a function between them that dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = moe_block(), moe_block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_not_traced(self.first(x)))


def test_what_lies_between_graphs_runs() -> None:
    torch._dynamo.reset()
    model, x = _Broken(), tokens().requires_grad_()
    want = model(x)
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)

    backend = moe_graph.npu_backend()
    x_npu = tokens().npu().requires_grad_()
    got = torch.compile(model.npu(), backend=backend)(x_npu)
    (got_grad,) = torch.autograd.grad(got.square().sum(), x_npu)

    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_grad.cpu(), want_grad, rtol=1e-4, atol=1e-5)
    assert backend.report.graphs > 1
    assert len(backend.report.rewritten) == 2
