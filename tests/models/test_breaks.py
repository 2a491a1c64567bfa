"""A model that dynamo breaks into several graphs: what lies between them runs eagerly."""

from __future__ import annotations

import torch

import moe_graph
from tests.models.blocks import moe_block, tokens


def test_a_loop_over_experts_breaks_and_still_runs() -> None:
    torch._dynamo.reset()
    block, x = moe_block("eager"), tokens().requires_grad_()
    want = block(x)
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)

    backend = moe_graph.npu_backend()
    x_npu = tokens().npu().requires_grad_()
    got = torch.compile(block.npu(), backend=backend)(x_npu)
    (got_grad,) = torch.autograd.grad(got.square().sum(), x_npu)

    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_grad.cpu(), want_grad, rtol=1e-4, atol=1e-5)
    assert backend.report.graphs > 1
