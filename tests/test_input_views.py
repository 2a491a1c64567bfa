"""Outputs that are views of inputs come from the inputs of this call, wherever these are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import moe_graph
from moe_graph.input_views import with_views_of_inputs

ROWS, WIDTH, PARTS = 4, 8, 5


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> None:
    torch._dynamo.reset()


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def gated(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.silu(x.matmul(w.t())) * x.matmul(w.T)


def sliced(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, 1:] @ w[1:]).sin()


def gradients(
    function: Callable[..., Any], weights: Tensor, parts: list[int], device: str
) -> list[Tensor]:
    """Call a function with parts of one tensor, then go back through all calls."""
    stack = weights.to(device).detach().requires_grad_()
    inputs, total = [], torch.zeros((), device=device)
    for part in parts:
        generator = torch.Generator().manual_seed(part)
        x = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()
        inputs.append(x)
        total = total + (function(x, stack[part]) * (part + 1)).sum()
    total.backward()
    return [tensor.grad.cpu() for tensor in (stack, *inputs) if tensor.grad is not None]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("parts", [[2], [2, 4], [0, 3], [3, 0], [1, 2, 3, 1]], ids=str)
@pytest.mark.parametrize("function", [product, gated, sliced])
def test_a_graph_that_serves_parts_of_a_stack_has_the_gradients_of_each(
    function: Callable[..., Tensor], parts: list[int], dynamic: bool
) -> None:
    weights = torch.randn(PARTS, WIDTH, WIDTH)
    want = gradients(function, weights, parts, "cpu")
    backend = moe_graph.npu_backend()
    got = gradients(
        torch.compile(function, backend=backend, dynamic=dynamic), weights, parts, "npu"
    )
    assert backend.report.graphs < len(parts) or len(parts) <= 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_returned_input_is_the_input() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), x + 1

    compiled = torch.compile(function, backend=moe_graph.npu_backend())
    stack = torch.arange(12.0).view(3, 2, 2).npu()
    for part in (1, 2, 0):
        view, more = compiled(stack[part])
        assert view.data_ptr() == stack[part].data_ptr()
        torch.testing.assert_close(view.cpu(), torch.arange(4.0) + 4 * part)
        torch.testing.assert_close(more.cpu().view(-1), torch.arange(4.0) + 4 * part + 1)


def convert(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return gm.forward


def kept_outputs(function: Callable[..., Any], *inputs: Tensor) -> int:
    """Return how many outputs a converter is given, after comparing the values."""
    gm = make_fx(function, tracing_mode="symbolic")(*inputs)
    want = function(*inputs)
    _, call = with_views_of_inputs(gm, inputs, convert)
    for one, other in zip(call(*inputs), want, strict=True):
        assert torch.equal(one, other)
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    return len(returned)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[1:, ::2].transpose(0, 1),
    lambda x: x.view(x.shape[0] * 2, -1),
    lambda x: x.unsqueeze(0).expand(3, -1, -1),
    lambda x: x.detach(),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.clone(),
    lambda x: x.t().contiguous(),
    lambda x: (x + 1).t(),
    lambda x: x.t().reshape(-1),
    lambda x: torch.as_strided(x, (2, 2), (1, 1), 3),
]


@pytest.mark.parametrize("make", VIEWS)
def test_a_view_leaves_the_graph(make: Callable[[Tensor], Tensor]) -> None:
    assert kept_outputs(lambda x: (x.exp(), make(x)), torch.randn(4, 6)) == 1


@pytest.mark.parametrize("make", OTHERS)
def test_what_is_no_view_of_an_input_stays(make: Callable[[Tensor], Tensor]) -> None:
    assert kept_outputs(lambda x: (x.exp(), make(x)), torch.randn(4, 6)) == 2
