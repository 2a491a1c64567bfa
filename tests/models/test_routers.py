"""Routers on the NPU: one GE node each, and eager results and gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.running import compile_on_npu
from tests.models.test_ge_graphs import read
from tests.passes.routers import EXPERTS, HIDDEN, LOWERED, RoutedMoe

ROUTERS = [
    "softmax-topk",
    "in-place",
    "p-norm",
    "topk-softmax",
    "sigmoid-undivided",
    "softmax-bias-clamp",
    "deepseek-v2",
    "deepseek-official",
]


class Model(nn.Module):
    """A layer with a path, which the counts of GE nodes go by."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.experts = RoutedMoe(LOWERED[name][1])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.experts(x, logits)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_one_node_that_trains(name: str, tmp_path: Path) -> None:
    module = Model(name)
    compiled, backend = compile_on_npu(copy.deepcopy(module), dump_dir=tmp_path)
    x, logits = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    inputs = {
        device: [t.detach().to(device).requires_grad_() for t in (x, logits)]
        for device in ("cpu", "npu")
    }
    expected, result = module(*inputs["cpu"]), compiled(*inputs["npu"])
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(expected)
    expected.backward(direction)
    result.backward(direction.npu())
    for there, here in zip(inputs["npu"], inputs["cpu"], strict=True):
        torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-5)

    (layer,) = backend.report.layers
    assert layer.router_op == LOWERED[name][0]
    assert layer.ge_nodes[layer.router_op] == 1
    types = {op.type for op in read(tmp_path / "ge_0_0.txt").op}
    assert not {"TopKV2", "MaskedFill", "ScatterElements"} & types
