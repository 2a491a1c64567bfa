"""Dispatch by the places of gates that are not zero, sorted by expert, and what looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_graph.config import Config
from tests.passes.capturing import compile_rewritten, result_and_gradients

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 5, 16, 8, 2, 14


class Dispatcher(nn.Module):
    """A sparse mixture; each keyword changes one step of it."""

    def __init__(self, **steps: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.3)
        self.steps: dict[str, Callable[..., Any]] = {
            "weights": lambda values: values.softmax(-1),
            "mask": lambda gates: gates > 0,
            "sort": lambda places: places.sort(0),
            "order": lambda order: order[:, 1],
            **steps,
        }

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps
        logits = self.router(x)
        values, ids = logits.topk(TOP_K, dim=-1)
        gates = torch.zeros_like(logits).scatter(1, ids, steps["weights"](values))
        places = torch.nonzero(gates)
        by_column, order = steps["sort"](places)
        order = steps["order"](order)
        _, expert = by_column.split(1, dim=1)
        token = places[order, 0]
        counts = steps["mask"](gates).sum(0).tolist()
        parts = torch.split(x[token], counts)
        outputs = [
            torch.relu(part @ up.t()) @ down.t()
            for part, up, down in zip(parts, self.w1, self.w2, strict=True)
        ]
        rows = torch.cat(outputs) * gates[token].gather(1, expert)
        return torch.zeros_like(x).index_add(0, token, rows)


SERVED: list[dict[str, Callable[..., Any]]] = [
    {},
    {"weights": lambda values: values.sigmoid()},
    {"weights": lambda values: values.exp().float()},
    {"mask": lambda gates: gates != 0},
    {"sort": lambda places: torch.sort(places, dim=0, stable=True)},
    {"order": lambda order: order.select(1, 1)},
]


def compiled_and_compared(module: Dispatcher) -> list[str]:
    x = torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module, config=Config(verify=True), frontends=True)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        result, gradients = result_and_gradients(compiled, module, x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    return [layer.status for layer in capture.layers]


@pytest.mark.parametrize("steps", SERVED)
def test_places_sorted_by_expert_are_a_dispatch(steps: dict[str, Callable[..., Any]]) -> None:
    assert compiled_and_compared(Dispatcher(**steps)) == ["rewritten"]


OTHERS: dict[str, dict[str, Callable[..., Any]]] = {
    "weights that may be zero": {"weights": lambda values: values.relu()},
    "weights that may be negative": {"weights": lambda values: values.tanh()},
    "order by token": {"order": lambda order: order[:, 0]},
    "places as they come": {"order": lambda order: torch.arange(order.shape[0])},
    "experts from the last": {"sort": lambda places: places.sort(0, descending=True)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_places_stay(name: str) -> None:
    module = Dispatcher(**OTHERS[name])
    module.router.weight.data.abs_()
    module.steps["mask"] = lambda gates: gates != 0
    x = torch.randn(TOKENS, HIDDEN).abs()
    compiled, capture = compile_rewritten(module, frontends=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert all(layer.status == "kept" for layer in capture.layers)
