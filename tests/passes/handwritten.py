"""A sorted-grouped MoE layer in pieces, each of which can be spelled in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers transformers::grouped_mm_fallback
from torch import Tensor, nn
from torch.nn import functional

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 12, 16, 8, 6, 3

grouped_mm = torch.ops.transformers.grouped_mm_fallback


@dataclass
class Routing:
    """What the pieces share; each piece fills in its part.

    Attributes:
        x: tokens ``[T, H]``.
        weights: ``[T, K]``.
        ids: ``[T, K]``.
        sorted_ids: ids by row.
        order: slot of each row.
        ends: running sum of the rows per expert, int32.
        rows: tokens by row.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    sorted_ids: Tensor = field(default=None)  # type: ignore[assignment]
    order: Tensor = field(default=None)  # type: ignore[assignment]
    ends: Tensor = field(default=None)  # type: ignore[assignment]

    @property
    def flat(self) -> Tensor:
        """Ids by slot."""
        return self.ids.reshape(-1)


def numbers(x: Tensor) -> Tensor:
    """Return the numbers of the rows of `x`."""
    return torch.arange(x.shape[0], device=x.device)


Piece = Callable[[Routing], Any]
Combine = Callable[[Routing, Tensor], Tensor]

SORTS: dict[str, Piece] = {
    "torch.sort": lambda r: torch.sort(r.flat),
    "sort-stable": lambda r: torch.sort(r.flat, stable=True),
    "method": lambda r: r.ids.view(-1).sort(0),
    "flatten": lambda r: r.ids.flatten().sort(dim=-1),
    "int32": lambda r: torch.sort(r.flat.int(), stable=True),
    "argsort": lambda r: (r.flat[torch.argsort(r.flat, stable=True)], r.flat.argsort(stable=True)),
}

DISPATCHES: dict[str, Piece] = {
    "floordiv": lambda r: r.x[r.order // TOP_K],
    "div-trunc": lambda r: r.x[r.order.div(TOP_K, rounding_mode="trunc")],
    "floor_divide": lambda r: r.x[torch.floor_divide(r.order, r.ids.shape[1])],
    "index_select": lambda r: r.x.index_select(0, r.order // TOP_K),
    "gather": lambda r: r.x.gather(0, (r.order // TOP_K).unsqueeze(-1).expand(-1, HIDDEN)),
    "repeat_interleave": lambda r: r.x.repeat_interleave(TOP_K, dim=0)[r.order],
    "unsqueeze-expand": lambda r: (
        r.x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN)[r.order]
    ),
    "token-numbers": lambda r: r.x[numbers(r.x).repeat_interleave(TOP_K)[r.order]],
    "slice-all": lambda r: r.x[r.order // TOP_K, :],
}

COUNTS: dict[str, Piece] = {
    "histc": lambda r: torch.histc(r.sorted_ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1),
    "histc-unsorted": lambda r: torch.histc(r.flat.float(), bins=EXPERTS, min=0, max=EXPERTS),
    "scatter_add": lambda r: r.flat.new_zeros(EXPERTS).scatter_add(
        0, r.flat, torch.ones_like(r.flat)
    ),
    "one_hot": lambda r: functional.one_hot(r.flat, EXPERTS).sum(0),
    "one_hot-2d": lambda r: functional.one_hot(r.ids, EXPERTS).sum(dim=(0, 1)),
    "map": lambda r: r.weights.new_zeros(r.ids.shape[0], EXPERTS).scatter_(1, r.ids, 1).sum(0),
}

INVERSES: dict[str, Piece] = {
    "setitem": lambda r: _by_setitem(r.order),
    "argsort": lambda r: torch.argsort(r.order),
    "sort": lambda r: r.order.sort()[1],
    "index_copy": lambda r: torch.empty_like(r.order).index_copy_(0, r.order, numbers(r.order)),
    "scatter": lambda r: torch.zeros_like(r.order).scatter(0, r.order, numbers(r.order)),
}


def _by_setitem(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = numbers(order)
    return inverse


def _unpermute(r: Routing, y: Tensor) -> Tensor:
    return y[INVERSES["setitem"](r)].view(r.x.shape[0], TOP_K, HIDDEN)


def _put_back(r: Routing, y: Tensor) -> Tensor:
    slots = torch.empty_like(y)
    slots[r.order] = y
    return slots.view(*r.ids.shape, -1)


def _weighted_rows(r: Routing, y: Tensor) -> Tensor:
    return y * r.weights.reshape(-1)[r.order].unsqueeze(-1)


def _in_place(r: Routing, y: Tensor) -> Tensor:
    return _put_back(r, y).type(r.weights.dtype).mul_(r.weights.unsqueeze(-1)).sum(1)


def _written_to(out: Tensor, r: Routing, y: Tensor) -> Tensor:
    out.index_add_(0, r.order // TOP_K, _weighted_rows(r, y))
    return out.view(-1, HIDDEN)


COMBINES: dict[str, Combine] = {
    "rows-then-sum": lambda r, y: _unpermute(r, _weighted_rows(r, y)).sum(1),
    "slots-then-sum": lambda r, y: (_unpermute(r, y) * r.weights[..., None]).sum(dim=1),
    "flat-slots": lambda r, y: (
        (y[torch.argsort(r.order)] * r.weights.view(-1, 1)).view(-1, TOP_K, HIDDEN).sum(-2)
    ),
    "put-back": lambda r, y: (_put_back(r, y) * r.weights.unsqueeze(-1)).sum(1),
    "in-place": _in_place,
    "index_copy": lambda r, y: (
        torch.empty_like(y)
        .index_copy_(0, r.order, y)
        .view(-1, TOP_K, HIDDEN)
        .mul(r.weights.unsqueeze(-1))
        .sum(1)
    ),
    "einsum": lambda r, y: torch.einsum("tkh,tk->th", _unpermute(r, y), r.weights),
    "bmm": lambda r, y: torch.bmm(r.weights.unsqueeze(1), _unpermute(r, y)).squeeze(1),
    "index_add": lambda r, y: torch.zeros_like(r.x).index_add_(
        0, r.order // TOP_K, _weighted_rows(r, y)
    ),
    "scatter_add": lambda r, y: torch.zeros_like(r.x).scatter_add(
        0, (r.order // TOP_K).unsqueeze(-1).expand(-1, HIDDEN), _weighted_rows(r, y)
    ),
    "onto-another": lambda r, y: r.x.index_add(0, r.order // TOP_K, _weighted_rows(r, y)),
    "written": lambda r, y: _written_to(torch.zeros_like(r.x), r, y),
    "written-onto-another": lambda r, y: _written_to(r.x * 2, r, y),
    "unweighted": lambda r, y: _unpermute(r, y).sum(1),
}


class HandwrittenMoe(nn.Module):
    """One layer out of one spelling of each piece."""

    def __init__(self, **pieces: Any) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.2)
        self.sort: Piece = pieces.get("sort", SORTS["torch.sort"])
        self.dispatch: Piece = pieces.get("dispatch", DISPATCHES["floordiv"])
        self.counts: Piece = pieces.get("counts", COUNTS["histc"])
        self.combine: Combine = pieces.get("combine", COMBINES["rows-then-sum"])
        self.body: Callable[..., Tensor] = pieces.get("body", HandwrittenMoe.experts)

    def route(self, x: Tensor) -> Routing:
        """Return softmax top-k routing."""
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return Routing(x, weights, ids)

    def experts(self, routing: Routing, rows: Tensor) -> Tensor:
        """Return the experts' rows."""
        gate, up = grouped_mm(rows, self.w13.transpose(1, 2), offs=routing.ends).chunk(2, -1)
        return grouped_mm(functional.silu(gate) * up, self.w2, offs=routing.ends)

    def forward(self, x: Tensor) -> Tensor:
        routing = self.route(x)
        routing.sorted_ids, routing.order = self.sort(routing)
        routing.ends = torch.cumsum(self.counts(routing), dim=0).to(torch.int32)
        y = self.body(self, routing, self.dispatch(routing))
        return self.combine(routing, y)
