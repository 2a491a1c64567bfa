"""Modules that sort, gather or add by index as a MoE layer does, and are none.

Each has some facts of a layer and lacks one: the same permutation on both sides, ids of experts, or
a product per expert between dispatch and combine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TopPSampling(nn.Module):
    """Sorts scores and puts them back, with no rows and no experts."""

    def forward(self, logits: Tensor) -> Tensor:
        values, order = torch.sort(logits, descending=True)
        drop = values.softmax(-1).cumsum(-1) > 0.9
        drop = torch.cat([torch.zeros_like(drop[:, :1]), drop[:, :-1]], -1)
        mask = torch.zeros_like(drop).scatter(1, order, drop)
        return logits.masked_fill(mask, float("-inf"))


class BeamSearch(nn.Module):
    """Divides top-k indices and gathers rows; the divisor is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.beams = 4

    def forward(self, scores: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        vocabulary = scores.shape[-1]
        _, flat = scores.view(1, -1).topk(self.beams)
        beam, token = flat.view(-1) // vocabulary, flat.view(-1) % vocabulary
        return states.index_select(0, beam), token


class PackByLength(nn.Module):
    """Sorts sequences by length, runs one network, sorts back."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = torch.sort(lengths, stable=True)[1]
        return self.network(x[order])[torch.sort(order)[1]]


class EmbeddingBag(nn.Module):
    """Gathers rows by id and adds them up by bag."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, width))

    def forward(self, ids: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
        rows = self.table[ids] * weights.unsqueeze(-1)
        return torch.zeros(8, rows.shape[1]).index_add(0, bags, rows)


class GraphAggregation(nn.Module):
    """Sorts edges by target, one product for all, adds by target."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        target, order = torch.sort(target, stable=True)
        messages = x[source[order]] @ self.weight
        return torch.zeros_like(x).index_add(0, target, messages)


class ReformerAttention(nn.Module):
    """Sorts by hash, attends within chunks, sorts back and averages the hashes."""

    def __init__(self, width: int = 16, hashes: int = 2) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(width, hashes, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens, hashes = x.shape[0], self.projection.shape[1]
        buckets = torch.einsum("td,dhr->thr", x, self.projection).argmax(-1)
        order = torch.sort(buckets.t().reshape(-1), stable=True)[1]
        rows = x[order % tokens].view(-1, 4, x.shape[1])
        attention = torch.bmm(rows, rows.transpose(1, 2)).softmax(-1)
        out = torch.bmm(attention, rows).view(-1, x.shape[1])
        return out[torch.sort(order)[1]].view(hashes, tokens, -1).mean(0)


class TokenMerging(nn.Module):
    """Sorts similarities and adds the most similar tokens onto others."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[::2], x[1::2]
        score, nearest = (left @ right.t()).max(-1)
        order = torch.sort(score, descending=True)[1]
        merged, kept = order[:4], order[4:]
        target = nearest[merged].unsqueeze(-1).expand(-1, x.shape[1])
        return torch.cat([left[kept], right.scatter_add(0, target, left[merged])])


class MixtureOfDepths(nn.Module):
    """Sends the top tokens through one network."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 1)
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.router(x).squeeze(-1).topk(4)
        tokens, order = torch.sort(tokens)
        rows = self.network(x[tokens]) * weights[order].unsqueeze(-1)
        return x.index_add(0, tokens, rows)


class VectorQuantisation(nn.Module):
    """Replaces each row by the nearest code."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, width))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        return functional.one_hot(nearest, 8).to(x.dtype) @ self.codes


def _rows() -> Tensor:
    return torch.randn(16, 16)


LOOKALIKES = [
    (TopPSampling, lambda: (torch.randn(4, 32),)),
    (BeamSearch, lambda: (torch.randn(4, 32), torch.randn(4, 16))),
    (PackByLength, lambda: (_rows(), torch.randint(1, 9, (16,)))),
    (
        EmbeddingBag,
        lambda: (torch.randint(32, (16,)), torch.randint(8, (16,)), torch.rand(16)),
    ),
    (GraphAggregation, lambda: (_rows(), torch.randint(16, (40,)), torch.randint(16, (40,)))),
    (ReformerAttention, lambda: (_rows(),)),
    (TokenMerging, lambda: (_rows(),)),
    (MixtureOfDepths, lambda: (_rows(),)),
    (VectorQuantisation, lambda: (_rows(),)),
]
