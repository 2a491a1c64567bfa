"""Views of tensors that are not dense where they were traced, through TorchAir and the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moe_graph

HEADS, TOKENS, WIDTH = 4, 6, 8


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> None:
    torch._dynamo.reset()


def heads(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x, w).view(1, TOKENS, HEADS, WIDTH).transpose(1, 2)


def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    return (heads(x, w).sin() + 1).transpose(1, 2).reshape(1, TOKENS, -1)


def transposed_input(x: Tensor, w: Tensor) -> Tensor:
    return x.t().reshape(-1).sin() * w.sum()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda g: g,
    "like the output": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    "backwards": lambda g: g.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
    "expanded": lambda g: g[:, :, :1].expand_as(g),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", GRADIENTS)
def test_gradient_of_a_transposed_output(layout: str, dynamic: bool) -> None:
    x, w = torch.randn(1, TOKENS, 16), torch.randn(HEADS * WIDTH, 16)
    grad = torch.randn(1, HEADS, TOKENS, WIDTH)
    compiled = torch.compile(heads, backend=moe_graph.npu_backend(), dynamic=dynamic)
    found = []
    for function, device in ((heads, "cpu"), (compiled, "npu")):
        inputs = [t.to(device, copy=True).requires_grad_() for t in (x, w)]
        function(*inputs).backward(GRADIENTS[layout](grad.to(device)))
        found.append([t.grad.cpu() for t in inputs if t.grad is not None])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_transposed_there_and_back(dynamic: bool) -> None:
    x, w = torch.randn(1, TOKENS, 16), torch.randn(HEADS * WIDTH, 16)
    compiled = torch.compile(there_and_back, backend=moe_graph.npu_backend(), dynamic=dynamic)
    got = compiled(x.npu(), w.npu()).cpu()
    torch.testing.assert_close(got, there_and_back(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_transposed_input(dynamic: bool) -> None:
    x, w = torch.randn(TOKENS, 16), torch.randn(3)
    compiled = torch.compile(transposed_input, backend=moe_graph.npu_backend(), dynamic=dynamic)
    for source in (x, torch.randn(16, TOKENS).t()):
        got = compiled(source.npu(), w.npu()).cpu()
        torch.testing.assert_close(got, transposed_input(source, w), rtol=1e-5, atol=1e-5)
