"""P8 and P11: one-hot tensors place tokens into slots of experts, or experts choose tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, WithStack, capacity_of


class GShardEinsum(WithStack):
    """Top-2 by two argmaxes; ranks of the second choice follow those of the first."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        gates = functional.softmax(logits, dim=1)
        capacity = capacity_of(x.shape[0], 2)
        ids1 = torch.argmax(gates, dim=1)
        mask1 = functional.one_hot(ids1, num_classes=EXPERTS)
        ids2 = torch.argmax(logits.masked_fill(mask1.bool(), float("-inf")), dim=1)
        mask2 = functional.one_hot(ids2, num_classes=EXPERTS)
        place1 = torch.cumsum(mask1, dim=0) - 1
        place2 = torch.cumsum(mask2, dim=0) - 1
        place2 += torch.sum(mask1, dim=0, keepdim=True)
        mask1 = mask1 * torch.lt(place1, capacity)
        mask2 = mask2 * torch.lt(place2, capacity)
        gate1 = torch.einsum("se,se->s", gates, mask1.float())
        gate2 = torch.einsum("se,se->s", gates, mask2.float())
        total = torch.clamp(gate1 + gate2, min=torch.finfo(gates.dtype).eps)
        combine = self._combine(gate1 / total, mask1, place1, capacity)
        combine = combine + self._combine(gate2 / total, mask2, place2, capacity)
        dispatch = combine.bool()
        slots = torch.einsum("sec,sm->ecm", dispatch.type_as(x), x)
        return torch.einsum("sec,ecm->sm", combine.type_as(x), self.batched(slots))

    def _combine(self, gate: Tensor, mask: Tensor, place: Tensor, capacity: int) -> Tensor:
        place = torch.sum(place * mask, dim=1)
        gates = torch.einsum("s,se->se", gate, mask.float())
        slots = functional.one_hot(place, num_classes=capacity).float()
        return torch.einsum("se,sc->sec", gates, slots)


class NanoMoe(WithStack):
    """Ranks over (choice, token): all first choices before any second one."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        values, ids = logits.topk(TOP_K, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter_(-1, ids, values).softmax(dim=-1)
        capacity = capacity_of(x.shape[0], TOP_K)
        mask = functional.one_hot(ids, num_classes=EXPERTS).permute(1, 0, 2)
        rank = mask.reshape(-1, EXPERTS).cumsum(dim=0) - 1
        rank = rank.reshape(TOP_K, -1, EXPERTS)
        mask = mask * torch.lt(rank, capacity)
        rank = torch.sum(mask * rank, dim=-1)
        weights = mask * gates.unsqueeze(0)
        slots = functional.one_hot(rank, num_classes=capacity)
        combine = torch.sum(weights.unsqueeze(3) * slots.unsqueeze(2), dim=0)
        dispatch = combine.bool()
        rows = dispatch.permute(1, 2, 0).type_as(x) @ x
        y = self.batched(rows).view(-1, HIDDEN)
        return combine.view(x.shape[0], -1) @ y


class LucidrainsTop2(WithStack):
    """Top-2 within each sequence; exclusive running sums; gates of 0 where dropped."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        capacity = max(min(tokens, int(tokens * 1.25 / EXPERTS)), 2)
        gates = self.router(x).softmax(dim=-1)
        gate1, ids1 = gates.topk(k=1, dim=-1)
        gate1, ids1 = gate1.squeeze(-1), ids1.squeeze(-1)
        mask1 = functional.one_hot(ids1, EXPERTS).float()
        gate2, ids2 = (gates * (1.0 - mask1)).topk(k=1, dim=-1)
        gate2, ids2 = gate2.squeeze(-1), ids2.squeeze(-1)
        mask2 = functional.one_hot(ids2, EXPERTS).float()
        total = gate1 + gate2 + 1e-9
        gate1, gate2 = gate1 / total, gate2 / total
        place1 = _exclusive_cumsum(mask1) * mask1
        mask1 = mask1 * (place1 < capacity).float()
        filled = mask1.sum(dim=-2, keepdim=True)
        kept1 = mask1.sum(dim=-1)
        place1 = (place1 * mask1).sum(dim=-1)
        place2 = (_exclusive_cumsum(mask2) + filled) * mask2
        mask2 = mask2 * (place2 < capacity).float()
        kept2 = mask2.sum(dim=-1)
        place2 = (place2 * mask2).sum(dim=-1)
        combine = _slots(gate1 * kept1, ids1, place1, capacity)
        combine = combine + _slots(gate2 * kept2, ids2, place2, capacity)
        dispatch = combine.bool().to(combine)
        rows = torch.einsum("bnd,bnec->ebcd", x, dispatch)
        y = self.batched(rows.reshape(EXPERTS, -1, HIDDEN)).reshape(rows.shape)
        return torch.einsum("ebcd,bnec->bnd", y, combine)


def _exclusive_cumsum(mask: Tensor) -> Tensor:
    return functional.pad(mask, (0, 0, 1, 0)).cumsum(dim=-2)[..., :-1, :]


def _slots(gate: Tensor, ids: Tensor, place: Tensor, capacity: int) -> Tensor:
    by_expert = gate[..., None, None] * functional.one_hot(ids, EXPERTS)[..., None]
    return by_expert * functional.one_hot(place.long(), capacity)[..., None, :]


class ExpertChoice(WithStack):
    """Each expert chooses the tokens that it likes best."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(dim=-1)
        weights, token = torch.topk(scores.t(), capacity_of(x.shape[0], TOP_K), dim=-1)
        y = self.batched(x[token]) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token.view(-1), y.view(-1, HIDDEN))
