"""What the styles share: sizes, experts, a router that never picks one of them.

Every style is a module with a linear ``router``; experts are stacked tensors ``w1`` ``[E, I, H]``,
``w3`` ``[E, I, H]`` and ``w2`` ``[E, H, I]``, or modules in ``experts``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers.integrations.moe  # noqa: F401  registers transformers::grouped_mm_fallback
from torch import Tensor, nn
from torch.nn import functional

grouped_mm = torch.ops.transformers.grouped_mm_fallback
"""The grouped product that dynamo can trace in fp32."""

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 6, 3
IDLE = EXPERTS - 2
"""The expert that no token picks."""

CAPACITY_FACTOR = 1.0


@dataclass(frozen=True)
class Style:
    """One way in which people write a MoE layer.

    Attributes:
        module: the layer.
        pattern: class of the pattern, ``P1`` to ``P11``.
        needs: what torch.compile needs to make one graph of it: ``nothing``, ``flags`` (the
            capture flags) or ``prepare``.
        status: what the passes are to do with it.
        check: check that the report names when it is kept.
        shape: shape of its input for a number of tokens.
        router_ops: routing ops that belong to the router and may stay after the rewrite.
        graphs: how many graphs dynamo makes of it for 2 to 64 tokens when shapes are dynamic; a
            capacity of 1 makes another one, ``one_hot`` with as many classes as the capacity one
            per number of tokens (0).
    """

    module: type[nn.Module]
    pattern: str
    needs: str = "nothing"
    status: str = "rewritten"
    check: str = ""
    shape: Callable[[int], tuple[int, ...]] = lambda tokens: (tokens, HIDDEN)
    router_ops: frozenset[str] = field(default_factory=frozenset)
    graphs: int = 1

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return self.module.__name__

    def build(self) -> nn.Module:
        """Return the layer with random weights and an idle expert."""
        torch.manual_seed(0)
        module = self.module()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            module.router.weight[IDLE, -1] = -100.0  # type: ignore[union-attr, operator, index]
        return module

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """Return hidden states of `count` tokens; the router meets a constant in the last place."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.shape(count), generator=generator)
        x[..., -1] = 1.0
        return x


class SwiGlu(nn.Module):
    """One expert, or the shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Mlp(nn.Module):
    """One expert with biases and without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Routed(nn.Module):
    """A layer with a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids ``[..., K]`` of softmax top-k routing, renormalised."""
        weights, ids = torch.topk(self.router(x).softmax(dim=-1), TOP_K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids


class WithModules(Routed):
    """A layer whose experts are modules."""

    expert: type[nn.Module] = SwiGlu

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.expert() for _ in range(EXPERTS))


class WithStack(Routed):
    """A layer whose experts are stacked tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))

    def grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' rows for rows ``[N, H]`` that are grouped by expert."""
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate = grouped_mm(rows, self.w1.transpose(-2, -1), offs=ends)
        up = grouped_mm(rows, self.w3.transpose(-2, -1), offs=ends)
        return grouped_mm(functional.silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)

    def batched(self, slots: Tensor) -> Tensor:
        """Return the experts' rows for ``[E, C, H]``."""
        gate = torch.bmm(slots, self.w1.transpose(1, 2))
        up = torch.bmm(slots, self.w3.transpose(1, 2))
        return torch.bmm(functional.silu(gate) * up, self.w2.transpose(1, 2))

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """Return the rows of one expert."""
        hidden = functional.silu(rows @ self.w1[expert].t()) * (rows @ self.w3[expert].t())
        return hidden @ self.w2[expert].t()


def capacity_of(tokens: int, top_k: int) -> int:
    """Return how many tokens an expert takes, so that some are dropped."""
    return math.ceil(tokens * top_k / EXPERTS * CAPACITY_FACTOR)
