"""One layer in many written forms: the same weights, the same results, other code.

``SORTED`` are the pieces of :mod:`tests.passes.handwritten` in ten combinations; ``OTHERS`` are
modules of other pattern classes over the same two stacked weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.handwritten import (
    COMBINES,
    COUNTS,
    DISPATCHES,
    EXPERTS,
    HIDDEN,
    INNER,
    SORTS,
    TOP_K,
    HandwrittenMoe,
    grouped_mm,
    numbers,
)


def _pieces(sort: str, dispatch: str, counts: str, combine: str) -> dict[str, Any]:
    return {
        "sort": SORTS[sort],
        "dispatch": DISPATCHES[dispatch],
        "counts": COUNTS[counts],
        "combine": COMBINES[combine],
    }


SORTED: list[dict[str, Any]] = [
    _pieces("torch.sort", "floordiv", "histc", "rows-then-sum"),
    _pieces("sort-stable", "div-trunc", "histc-unsorted", "index_add"),
    _pieces("argsort", "repeat_interleave", "one_hot", "einsum"),
    _pieces("method", "gather", "one_hot-2d", "scatter_add"),
    _pieces("flatten", "index_select", "scatter_add", "put-back"),
    _pieces("int32", "unsqueeze-expand", "map", "bmm"),
    _pieces("torch.sort", "token-numbers", "histc", "in-place"),
    _pieces("argsort", "slice-all", "map", "index_copy"),
    _pieces("sort-stable", "floor_divide", "one_hot", "flat-slots"),
    _pieces("method", "floordiv", "scatter_add", "slots-then-sum"),
]


class RoutingMap(HandwrittenMoe):
    """P3: a descending stable sort of the map of tokens by experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights)
        chosen = x.new_zeros(x.shape[0], EXPERTS).int().scatter(1, ids, 1).bool()
        ends = torch.cumsum(chosen.sum(0), 0).to(torch.int32)
        by_expert = chosen.T.contiguous().view(-1)
        flat = torch.argsort(by_expert, descending=True, stable=True)[: x.shape[0] * TOP_K]
        token = flat % x.shape[0]
        gate, up = grouped_mm(x[token], self.w13.transpose(1, 2), offs=ends).chunk(2, -1)
        y = grouped_mm(functional.silu(gate) * up, self.w2, offs=ends)
        y = y * gates.T.contiguous().view(-1)[flat].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, y)


class MaskedSelect(HandwrittenMoe):
    """P3: token numbers selected by the map."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights).T.contiguous()
        chosen = x.new_zeros(x.shape[0], EXPERTS).int().scatter(1, ids, 1).bool()
        ends = torch.cumsum(chosen.sum(0), 0).to(torch.int32)
        chosen = chosen.T.contiguous()
        token = numbers(x).unsqueeze(0).expand(EXPERTS, -1).masked_select(chosen)
        gate, up = grouped_mm(x[token], self.w13.transpose(1, 2), offs=ends).chunk(2, -1)
        y = grouped_mm(functional.silu(gate) * up, self.w2, offs=ends)
        y = y * gates.masked_select(chosen).unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(0, token.unsqueeze(1).expand(-1, HIDDEN), y)


class _Loop(HandwrittenMoe):
    """A loop over experts on stacked weights."""

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """Return the rows of one expert."""
        gate, up = functional.linear(rows, self.w13[expert]).chunk(2, -1)
        return (functional.silu(gate) * up) @ self.w2[expert]


class LoopWithWhere(_Loop):
    """P4: ``where`` finds tokens and choices, ``index_add_`` adds."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, nth = torch.where(ids == expert)
            out.index_add_(0, token, self.one(x[token], expert) * weights[token, nth, None])
        return out


class LoopWithMasks(_Loop):
    """P4: a one-hot mask by expert, ``+=`` adds."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(x)
        masks = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for expert in range(EXPERTS):
            nth, token = torch.where(masks[expert])
            out[token] += self.one(x[token], expert) * weights[token, nth, None]
        return out


class LoopOverSlots(_Loop):
    """P4: each expert fills in its slots."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        copies, flat = x.repeat_interleave(TOP_K, dim=0), ids.view(-1)
        y = torch.empty_like(copies)
        for expert in range(EXPERTS):
            y[flat == expert] = self.one(copies[flat == expert], expert)
        return (y.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class SplitRows(_Loop):
    """P5: sorted rows split by counts that the host reads."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        sizes = functional.one_hot(ids.view(-1), EXPERTS).sum(0).tolist()
        order = torch.argsort(ids.view(-1), stable=True)
        parts = torch.split(x[order // TOP_K], sizes)
        y = torch.cat([self.one(part, expert) for expert, part in enumerate(parts)])
        y = y * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // TOP_K, y)


class GatheredBatches(HandwrittenMoe):
    """P6: the weights of each slot, batched products."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        flat, rows = ids.reshape(-1), x.repeat_interleave(TOP_K, dim=0)
        gate, up = torch.bmm(self.w13[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm((functional.silu(gate) * up).unsqueeze(1), self.w2[flat]).squeeze(1)
        return (y * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1)


class GatheredEinsum(HandwrittenMoe):
    """P6: the weights of each token's experts, einsums."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        hidden = torch.einsum("th,tkih->tki", x, self.w13[ids])
        hidden = functional.silu(hidden[..., :INNER]) * hidden[..., INNER:]
        y = torch.einsum("tki,tkih->tkh", hidden, self.w2[ids])
        return torch.einsum("tkh,tk->th", y, weights)


OTHERS: list[type[HandwrittenMoe]] = [
    RoutingMap,
    MaskedSelect,
    LoopWithWhere,
    LoopWithMasks,
    LoopOverSlots,
    SplitRows,
    GatheredBatches,
    GatheredEinsum,
]
