"""Loops over experts in spellings that are lifted: of hits, masks, tests for tokens, numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INNER, EXPERTS, TOP_K = 8, 4, 6, 2
IDLE = 3
"""No token chooses this expert."""


class Layer(nn.Module):
    """A layer with a router, experts as modules and as stacked weights."""

    top_k = TOP_K

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3)
        with torch.no_grad():
            self.router.bias[IDLE] = -100.0

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids ``[T, K]``."""
        return self.router(x).softmax(-1).topk(self.top_k)


class HitRows(Layer):
    """Rows of ``nonzero``: tensors of one number."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        out = torch.zeros_like(x)
        for e in hit:
            expert = self.experts[e]
            slot, token = torch.where(mask[e].squeeze(0))
            y = expert(x[None, token].reshape(-1, HIDDEN)) * weights[token, slot, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out


class HitRowsTopOne(HitRows):
    """One slot per token: ``mask[e]`` has two axes of size 1 when `e` is a tensor."""

    top_k = 1


class HitNumbers(Layer):
    """First elements of rows, with the mask kept out of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = functional.one_hot(ids, num_classes=self.num_experts + 1)
            mask = mask.permute(2, 1, 0)
            hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        for e in hit[:]:
            e = e[0]
            if e == self.num_experts:
                continue
            with torch.no_grad():
                slot, token = torch.where(mask[e])
            y = functional.linear(x[token], self.weight[e]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


class HitNumbersBeyond(Layer):
    """One row of the mask more than experts, and no test for it."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, num_classes=self.num_experts + 1).permute(2, 1, 0)
        shape = (-1, HIDDEN, HIDDEN)
        out = torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = e[0]
            slot, token = torch.where(mask[e])
            y = x[token] @ self.weight.view(shape)[e]
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class HitItems(Layer):
    """Numbers by ``item``, no mask but the ids."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        out = torch.zeros_like(x)
        for row in counts.nonzero():
            e = int(row.item())
            token, slot = (ids == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            out[token] += self.experts[e](x[token]) * weights[token, slot].unsqueeze(-1)
        return out


class HitList(Layer):
    """A list of numbers, masks along the last axis, modules by name."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict(
            {f"expert_{e}": nn.Linear(HIDDEN, HIDDEN) for e in range(EXPERTS)}
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        chosen = functional.one_hot(ids[:, 0], EXPERTS)
        chosen = chosen.bool()
        tokens, experts = chosen.shape
        hit = chosen.reshape(tokens, experts).sum(dim=0)
        hit = torch.nonzero(hit, as_tuple=True)[0].tolist()
        out = torch.zeros_like(x)
        for e in hit:
            out[chosen[:, e]] = getattr(self.named, f"expert_{e}")(x[chosen[:, e]])
        return out * weights[:, :1]


class HitsOfAnArgument(Layer):
    """The mask comes from elsewhere: its elements might be negative."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        mask = functional.one_hot(ids, EXPERTS).permute(0, 1, 2)
        mask[:, 0, IDLE] = 1 - 2 * (torch.arange(len(x)) % 2)  # sums up to 0
        return self.loop(x, mask, weights)

    def loop(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted rows of all experts that a token chose."""
        mask = chosen.permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            y = self.experts[e](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


class BroadcastNumber(Layer):
    """The number of the expert, as a tensor, among the places of its tokens; one axis kept."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        dense = torch.zeros(x.shape[0], EXPERTS).scatter_(1, ids, weights)
        mask = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            _, token = torch.where(mask[e[0]])
            y = (x[token] @ self.weight[e])[0] * dense[token, e, None]
            out.index_add_(0, token, y)
        return out


class TestByLength(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if len(token) > 0:
                y = self.experts[e](x[token]) * weights[token, slot, None]
                out.index_add_(0, token, y)
        return out


class TestBySum(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = ids.eq(e)
            if chosen.sum() == 0:
                continue
            token, slot = chosen.nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class TestNotAny(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            chosen = (ids == e).any(dim=-1)
            if not chosen.any():
                continue
            scale = torch.where(ids[chosen] == e, weights[chosen], 0.0).sum(-1, keepdim=True)
            out[chosen] += self.experts[e](x[chosen]) * scale
        return out


class TestAmongOthers(Layer):
    """A setting decides as well; a nested branch scales the rows in place."""

    keep = 0.5

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            if token.size(0) != 0 and self.keep > 0:
                y = self.experts[e](x[token]) * weights[token, slot, None]
                if self.keep < 1:
                    y *= self.keep
                out.scatter_add_(0, token.unsqueeze(-1).expand(-1, HIDDEN), y)
        return out


class TestByCount(Layer):
    """Counts of a scatter, read on the host one by one."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = torch.zeros(x.shape[0], EXPERTS, dtype=torch.long).scatter(1, ids, 1).sum(0)
        counts = counts.tolist()
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            n = counts[e]
            if n == 0:
                continue
            token, slot = torch.where(ids == e)
            out[token] = out[token] + self.experts[e](x[token]) * weights[token, slot, None]
        return out


class CursorByAdding(Layer):
    """``start += n``; numpy counts; a module list indexed with an offset."""

    first = 0

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        counts = torch.bincount(flat, minlength=len(self.experts))
        order = torch.argsort(flat)
        rows = x[order // ids.shape[1]]
        counts = counts.cpu().numpy()
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start : start + n]))
            start += n
        y = torch.cat(outputs, dim=0)
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


LIFTED: list[type[Layer]] = [
    HitRows,
    HitRowsTopOne,
    HitNumbers,
    HitNumbersBeyond,
    HitItems,
    HitList,
    HitsOfAnArgument,
    BroadcastNumber,
    TestByLength,
    TestBySum,
    TestNotAny,
    TestAmongOthers,
    TestByCount,
    CursorByAdding,
]
