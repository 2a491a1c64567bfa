"""Compile time over the number of experts and of layers, and the passes' share of it.

``python -m benchmarks.compile_time`` prints one table: stacked weights (``grouped_mm`` of the
project's own small layer) and loops over experts, each compiled for the emulated NPU, inference,
static shapes. Ratios are to the first row of the same form with as many layers, measured in one
run. Run it on an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import moe_graph  # first: loads the emulated Ascend stack where no CANN is installed

# isort: split
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import moe_graph.backend

HIDDEN, INNER, TOP_K, TOKENS = 32, 16, 2, 16
CASES = [
    *[("stacked", experts, layers) for layers in (1, 8, 32) for experts in (8, 64, 256)],
    *[("loop", experts, 1) for experts in (8, 64, 256)],
    *[("loop", experts, 8) for experts in (8, 64)],
]
"""(form, experts, layers); a loop of 8 layers with 256 experts is 2,048 bodies to trace."""


class Layer(nn.Module):
    """One MoE layer with a router of its own, residual added."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, INNER, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER) * 0.1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids ``[T, K]``."""
        return self.router(x).softmax(-1).topk(TOP_K)


class Stacked(Layer):
    """Gathers the weights of every slot; lowers to products of the stacked weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        weights, ids = self.route(x)
        h = functional.silu(torch.einsum("th,tkih->tki", x, self.up[ids]))
        y = torch.einsum("tki,tkhi->tkh", h, self.down[ids])
        return x + (y * weights.unsqueeze(-1)).sum(1)


class Loop(Layer):
    """Loops over the experts; dynamo unrolls it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            token, choice = torch.where(ids == expert)
            h = functional.silu(functional.linear(x[token], self.up[expert]))
            y = functional.linear(h, self.down[expert]) * weights[token, choice, None]
            out.index_add_(0, token, y)
        return x + out


FORMS: dict[str, type[Layer]] = {"stacked": Stacked, "loop": Loop}


def measure(form: str, experts: int, layers: int) -> tuple[float, float, int]:
    """Return the seconds of a compilation, those of the passes, and the rewritten layers."""
    torch._dynamo.reset()
    model = nn.Sequential(*(FORMS[form](experts) for _ in range(layers))).npu().eval()
    backend, spent = moe_graph.npu_backend(), [0.0]
    original: Callable[..., Any] = moe_graph.backend.rewrite_moe_layers

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args)
        finally:
            spent[0] += time.perf_counter() - start

    moe_graph.backend.rewrite_moe_layers = timed  # type: ignore[assignment]
    try:
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        x = torch.randn(TOKENS, HIDDEN).npu()
        start = time.perf_counter()
        with torch.no_grad():
            compiled(x)
        total = time.perf_counter() - start
    finally:
        moe_graph.backend.rewrite_moe_layers = original  # type: ignore[assignment]
    rewritten = sum(layer.status == "rewritten" for layer in backend.report.layers)
    return total, spent[0], rewritten


def main() -> None:
    """Measure every case once and print the table."""
    measure("stacked", 4, 1)
    table = Table(title="compile time, one thread")
    for column in ("form", "layers", "experts", "seconds", "ratio to E=8", "passes", "rewritten"):
        table.add_column(column, justify="right")
    base: dict[tuple[str, int], float] = {}
    for form, experts, layers in CASES:
        total, passes, rewritten = measure(form, experts, layers)
        first = base.setdefault((form, layers), total)
        table.add_row(
            form,
            str(layers),
            str(experts),
            f"{total:.2f}",
            f"{total / first:.2f}",
            f"{passes / total:.1%}",
            f"{rewritten} of {layers}",
        )
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
