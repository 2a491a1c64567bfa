"""P1 and P2: slots sorted by expert, one grouped product, back by slot and sum or by adding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, SwiGlu, WithStack


class TorchtitanScoreBefore(WithStack):
    """Scores multiply the experts' input; rows are added onto the shared expert's output."""

    score_before = True

    def __init__(self) -> None:
        super().__init__()
        self.shared = SwiGlu()
        self.register_buffer("loads", torch.zeros(EXPERTS), persistent=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self.router(x).to(torch.float32))
        _, ids = torch.topk(scores, k=TOP_K, dim=1)
        weights = scores.gather(dim=1, index=ids)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20), ids

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.grouped(rows, counts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        with torch.no_grad():
            self.loads.add_(counts)
        order = torch.argsort(ids.view(-1), stable=True)
        scores = weights.view(-1)[order].reshape(-1, 1)
        token = (order // TOP_K).reshape(-1, 1).expand(-1, HIDDEN)
        rows = torch.gather(x, dim=0, index=token)
        if self.score_before:
            rows = (rows.to(torch.float32) * scores).to(x.dtype)
        y = self.experts(rows, counts)
        if not self.score_before:
            y = (y.to(torch.float32) * scores).to(x.dtype)
        return self.shared(x).scatter_add(dim=0, index=token, src=y)


class TorchtitanScoreAfter(TorchtitanScoreBefore):
    """Scores multiply the experts' output."""

    score_before = False


class MegatronLegacyIndices(WithStack):
    """Sorted indices; ``index_copy_`` puts the rows back."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
        y = self.grouped(x.index_select(0, order // TOP_K), counts)
        slots = torch.zeros(flat.shape[0], HIDDEN, dtype=y.dtype, device=x.device)
        slots.index_copy_(0, order, y)
        return (slots.reshape(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(dim=1)


class MegablocksSort(WithStack):
    """Bins by sorting 32-bit ids; rows take their weight on the way back."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten().int()
        _, indices = torch.sort(flat)
        counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self.grouped(x[indices // TOP_K], counts)
        y = y * weights.flatten()[indices].unsqueeze(1)
        slots = torch.empty_like(y)
        slots[indices] = y
        return slots.view(-1, TOP_K, HIDDEN).sum(dim=1)


class ArgsortOfArgsort(WithStack):
    """The inverse permutation is the argsort of the argsort."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = order.argsort()
        counts = functional.one_hot(flat, EXPERTS).sum(dim=0)
        y = self.grouped(x.repeat_interleave(TOP_K, dim=0)[order], counts)
        return torch.einsum("tkh,tk->th", y[inverse].view(-1, TOP_K, HIDDEN), weights)


class ArgsortOfArgsortBincount(WithStack):
    """The same with the counts of ``bincount``, whose length depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.argsort(order)
        rows = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN)[order]
        y = self.grouped(rows, torch.bincount(flat, minlength=EXPERTS))
        return (y[inverse].view(*ids.shape, -1) * weights[..., None]).sum(dim=1)
