"""Loops over experts that look like others, but in which an expert without tokens has an effect.

Each class names the condition that fails, and a piece of the line at which it does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, EXPERTS, TOP_K = 8, 6, 2
IDLE = 3
"""No token chooses this expert."""


class Layer(nn.Module):
    """A layer with a router and experts; `check` is the condition that fails, at `line`."""

    check: ClassVar[str]
    line: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.bias = nn.Parameter(torch.ones(HIDDEN))
        self.count = 0
        with torch.no_grad():
            self.router.bias[IDLE] = -100.0

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids ``[T, K]``."""
        return self.router(x).softmax(-1).topk(TOP_K)


class Counter(Layer):
    check, line = "state", "self.count += 1"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            self.count += 1
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Print(Layer):
    check, line = "pure", "print(e)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.shape[0] > 0:
                print(e)
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Break(Layer):
    check, line = "statement", "break"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                break
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class BiasOnAllRows(Layer):
    check, line = "write", "out += self.bias"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            out += self.bias
        return out


class ElseBranch(Layer):
    check, line = "write", "out.add_(self.bias)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() > 0:
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            else:
                out.add_(self.bias)
        return out


class Carried(Layer):
    check, line = "carried", "token, slot = torch.where(ids == e)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out, scale = torch.zeros_like(x), 1.0
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y = self.experts[e](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y * scale)
            scale = scale * 0.5
        return out


class ReadLater(Layer):
    check, line = "carried", "token, slot = torch.where(ids == e)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out, last = torch.zeros_like(x), x
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            last = self.experts[e](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, last)
        return out + last.sum()


class LastExpert(Layer):
    check, line = "carried", "token, slot = torch.where(ids == e)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out * e


class StaleRows(Layer):
    """An expert without tokens appends the rows of the one before."""

    check, line = "write", "outputs.append(y)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        outputs: list[Tensor] = []
        y = x[:0]
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() > 0:
                y = self.experts[e](x[token]) * weights[token, slot, None]
            outputs.append(y)
        return torch.cat(outputs)


class CountedList(Layer):
    check, line = "write", "len(outputs)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        outputs = []
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            outputs.append(self.experts[e](x[token]) * weights[token, slot, None])
        return torch.cat(outputs) * len(outputs)


class AnotherTest(Layer):
    check, line = "test", "token.numel() > 1"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() > 1:
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Random(Layer):
    check, line = "pure", "torch.rand("

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y = self.experts[e](x[token]) * weights[token, slot, None] * torch.rand(1)
            out.index_add_(0, token, y)
        return out


class _Counting(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CountingExperts(Layer):
    check, line = "pure", "self.experts[e](x[token])"

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_Counting(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class NormalisedExperts(CountingExperts):
    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)) for _ in "123456")
        self.experts = nn.ModuleList(parts)


class HookedExperts(CountingExperts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.experts[IDLE].register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        self.count += 1


class HelperWithEffect(Layer):
    check, line = "pure", "self.apply_expert(e, x[token])"

    def apply_expert(self, e: int, rows: Tensor) -> Tensor:
        """Apply an expert, and remember it."""
        self.last = e
        return self.experts[e](rows)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y = self.apply_expert(e, x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


class HitsOfAnother(Layer):
    """Only the experts that the first choices hit take part, whoever else was chosen."""

    check, line = "write", "out.index_add_"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        first = ids[:, :1]
        hit = (functional.one_hot(first, EXPERTS).permute(2, 1, 0).sum(dim=(-1, -2)) > 0).nonzero()
        out = torch.zeros_like(x)
        for e in hit:
            token, slot = torch.where(ids == e.item())
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class ChoiceChanges(Layer):
    """Each token that was seen is then sent to the idle expert, which was not hit before."""

    check, line = "choice", "mask[:, slot, token] = 1"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        out = torch.zeros_like(x)
        for e in hit:
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            mask[:, slot, token] = 1
        return out


class UnknownHits(Layer):
    check, line = "hits", "for e in hit"

    def hits(self, ids: Tensor) -> Tensor:
        """Return the experts that were chosen, but for the first one."""
        return torch.unique(ids)[1:]

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        hit = self.hits(ids)
        out = torch.zeros_like(x)
        for e in hit:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class NumberAsTensor(Layer):
    check, line = "expert-number", "x[token] * e"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        out = torch.zeros_like(x)
        for e in hit:
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, x[token] * e * weights[token, slot, None])
        return out


class HitsInAnotherOrder(Layer):
    check, line = "loop", "for i, e in enumerate(hit)"

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        out = torch.zeros_like(x)
        for i, e in enumerate(hit):
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[i](x[token]) * weights[token, slot, None])
        return out


class SlicesOutOfOrder(Layer):
    """The slices are cut from the tokens as they came."""

    check, line = "order", "x[start:end]"

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        x = x.repeat_interleave(TOP_K, dim=0)
        counts = torch.bincount(ids.view(-1), minlength=EXPERTS).tolist()
        outputs, start = [], 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](x[start:end]))
            start = end
        return torch.cat(outputs)


class CountIsUsed(Layer):
    check, line = "counts", "* n"

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // TOP_K]
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        outputs, start = [], 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]) * n)
            start = end
        return torch.cat(outputs)


class EndIsUsed(Layer):
    check, line = "carried", "end = start + n"

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // TOP_K]
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        outputs, start = [], 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]))
            start = end
        return torch.cat(outputs) * start


class PooledExperts(Layer):
    """Each expert gives one row, also for no tokens."""

    check, line = "write", "outputs.append"

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // TOP_K]
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        outputs, start = [], 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]).sum(0, keepdim=True))
            start = end
        return torch.cat(outputs)


class StartIsOne(Layer):
    check, line = "write", "outputs.append"

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // TOP_K]
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        outputs, start = [], 1
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]))
            start = end
        return torch.cat(outputs)


LEFT_ALONE: list[type[Layer]] = [
    Counter,
    Print,
    Break,
    BiasOnAllRows,
    ElseBranch,
    Carried,
    ReadLater,
    LastExpert,
    StaleRows,
    CountedList,
    AnotherTest,
    Random,
    CountingExperts,
    NormalisedExperts,
    HookedExperts,
    HelperWithEffect,
    HitsOfAnother,
    ChoiceChanges,
    UnknownHits,
    NumberAsTensor,
    HitsInAnotherOrder,
    SlicesOutOfOrder,
    CountIsUsed,
    EndIsUsed,
    PooledExperts,
    StartIsOne,
]
