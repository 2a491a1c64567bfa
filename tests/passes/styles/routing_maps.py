"""P3 and P10: a map of tokens by experts says who goes where.

Current Megatron-LM permutes by the map (``masked_select``, or a descending stable sort of it where
shapes must not depend on data), and drops by probability where an expert has too many tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, WithModules, WithStack, capacity_of


def maps(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[T, E]``, zero where not chosen, and the map ``[T, E]``."""
    probabilities = torch.zeros_like(logits).scatter(1, ids, weights)
    return probabilities, torch.zeros_like(logits).int().scatter(1, ids, 1).bool()


class MegatronRoutingMap(WithStack):
    """Permutes by a descending stable sort of the map by expert."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), TOP_K, dim=1)
        probabilities, chosen = maps(logits, weights.type_as(logits), ids)
        counts = chosen.sum(dim=0).long()
        by_expert = chosen.T.contiguous().view(-1)
        flat = torch.argsort(by_expert, descending=True, stable=True)[: x.shape[0] * TOP_K]
        token = flat % x.shape[0]
        rows = x.index_select(0, token)
        row_weights = probabilities.T.contiguous().view(-1)[flat]
        y = self.grouped(rows, counts) * row_weights.unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=y.dtype, device=x.device)
        return out.scatter_add(0, token.unsqueeze(1).expand(-1, HIDDEN), y)


class MegatronMaskedSelect(WithStack):
    """Permutes by ``masked_select`` of token numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return by_masked_select(x, self.router(x), self.grouped)


class MegatronSequentialExperts(WithModules):
    """The same, with one module per expert that runs on its part of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return by_masked_select(x, self.router(x), self.one_by_one)

    def one_by_one(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([run(part) for run, part in zip(self.experts, parts, strict=True)])


def by_masked_select(x: Tensor, logits: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    values, ids = torch.topk(logits, TOP_K, dim=1)
    weights = torch.softmax(values, dim=-1, dtype=torch.float32).type_as(logits)
    probabilities, chosen = maps(logits, weights, ids)
    counts = chosen.sum(dim=0)
    chosen = chosen.T.contiguous()
    numbers = torch.arange(x.shape[0], device=x.device).unsqueeze(0).expand(EXPERTS, -1)
    token = numbers.masked_select(chosen)
    row_weights = probabilities.T.contiguous().masked_select(chosen)
    y = run(x.index_select(0, token), counts) * row_weights.unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=y.dtype, device=x.device)
    out.scatter_add_(0, token.unsqueeze(1).expand(-1, HIDDEN), y)
    return out


class MegatronDropAndPad(WithStack):
    """Each expert takes the ``C`` likeliest tokens; empty places are filled with other tokens."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, logits = x.shape[0], self.router(x)
        weights, ids = torch.topk(torch.softmax(logits, dim=-1), TOP_K, dim=1)
        gates = torch.zeros_like(logits).scatter(1, ids, weights)
        capacity = capacity_of(tokens, TOP_K)
        _, kept = torch.topk(gates, k=capacity, dim=0, sorted=False)
        chosen = torch.zeros_like(logits).scatter(0, kept, 1).bool()
        probabilities = gates * chosen
        by_expert = chosen.to(torch.int8).T.contiguous()
        token = by_expert.argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
        flat = (torch.arange(EXPERTS, device=x.device).unsqueeze(-1) * tokens + token).view(-1)
        row_weights = probabilities.T.contiguous().view(-1).index_select(0, flat)
        token = token.view(-1)
        y = self.batched(x.index_select(0, token).view(EXPERTS, capacity, HIDDEN))
        y = y.view(-1, HIDDEN) * row_weights.unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=y.dtype, device=x.device)
        return out.scatter_add(0, token.unsqueeze(1).expand(-1, HIDDEN), y)
