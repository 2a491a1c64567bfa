"""Modules that sort, gather or add by index as a MoE layer does, and are none.

Each has some facts of a layer and lacks one: the same permutation on both sides, ids of experts, or
a product per expert between dispatch and combine.
"""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  registers transformers::grouped_mm_fallback
from torch import Tensor, nn
from torch.nn import functional

grouped_mm = torch.ops.transformers.grouped_mm_fallback


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


class BucketLoop(nn.Module):
    """A loop over buckets as over experts, with one network for all of them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scores = nn.Linear(width, 4)
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, buckets = self.scores(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for bucket in range(4):
            row, nth = torch.where(buckets == bucket)
            out.index_add_(0, row, self.network(x[row]) * weights[row, nth, None])
        return out


class HeadPerClass(nn.Module):
    """A head per class, chosen by labels that come with the data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for label, head in enumerate(self.heads):
            rows = torch.where(labels == label)[0]
            out[rows] = head(x[rows])
        return out


class AdapterPerRequest(nn.Module):
    """Low-rank weights gathered by the adapter of each request."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(5, 2, width))
        self.up = nn.Parameter(torch.randn(5, width, 2))

    def forward(self, x: Tensor, adapters: Tensor) -> Tensor:
        low = torch.bmm(self.down[adapters], x.unsqueeze(-1))
        return self.base(x) + torch.bmm(self.up[adapters], low).squeeze(-1)


class NetworkPerModality(nn.Module):
    """Sorts tokens by a kind that comes with the data, multiplies each kind, sorts back."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, width, width))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        order = torch.argsort(kinds, stable=True)
        ends = functional.one_hot(kinds, 3).sum(0).cumsum(0).to(torch.int32)
        rows = grouped_mm(x[order], self.weights, offs=ends)
        return rows[torch.argsort(order)]


class OneHotPositions(nn.Module):
    """Adds embeddings of positions by one-hot products, cut off at a longest distance."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(8, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        place = torch.cumsum(mask, dim=-1) - 1
        mask = mask * torch.lt(place, 8)
        hot = functional.one_hot((place * mask).clamp(min=0), 8).to(x.dtype)
        return x + torch.einsum("tp,pd->td", hot * mask.unsqueeze(-1), self.positions)


class PackSequences(nn.Module):
    """Running counts of the mask pack the tokens that are no padding into a buffer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        place = torch.cumsum(mask, dim=0) - 1
        keep = (mask > 0) & (place < 8)
        slot = torch.where(keep, place, 8)
        buffer = torch.zeros(9, x.shape[1]).index_add(0, slot, x)
        y = self.network(buffer[:-1])
        y = torch.cat([y, torch.zeros(1, x.shape[1])])
        return y.index_select(0, slot) * keep.unsqueeze(-1)


class SegmentMean(nn.Module):
    """Adds rows by segment and divides by how many there are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        total = torch.zeros(6, x.shape[1]).index_add(0, segments, self.network(x))
        counts = torch.zeros(6).scatter_add(0, segments, torch.ones(x.shape[0]))
        return (total / counts.clamp(min=1).unsqueeze(-1))[segments]


class KMeansUpdate(nn.Module):
    """Moves centroids to the mean of their rows by a one-hot product."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.randn(6, width))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.centroids).neg().argmax(-1)
        hot = functional.one_hot(nearest, num_classes=6).to(x.dtype)
        counts = hot.sum(dim=0).clamp(min=1)
        return torch.einsum("te,td->ed", hot, x) / counts.unsqueeze(-1)


class MixtureOfSoftmaxes(nn.Module):
    """Dense mixture weights over products with a stacked tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.prior = nn.Linear(width, 4)
        self.latent = nn.Parameter(torch.randn(4, width, width))
        self.decoder = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        prior = self.prior(x).softmax(-1)
        latent = torch.tanh(torch.einsum("td,edh->teh", x, self.latent))
        return torch.einsum("te,tev->tv", prior, self.decoder(latent).softmax(-1))


class SoftMoe(nn.Module):
    """Slots that are weighted means of all tokens: einsums of dispatch and combine, no choice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(width, 4, 2))
        self.weights = nn.Parameter(torch.randn(4, width, width))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("td,dec->tec", x, self.slots)
        rows = torch.einsum("tec,td->ecd", logits.softmax(0), x)
        y = torch.bmm(rows, self.weights)
        combine = logits.flatten(1).softmax(-1).view(logits.shape)
        return torch.einsum("tec,ecd->td", combine, y)


class ProductKeyMemory(nn.Module):
    """Two top-ks over half keys, one over their sums, and a weighted bag of values."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 6, width // 2))
        self.values = nn.Parameter(torch.randn(36, width))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        left_scores, left_ids = (left @ self.keys[0].t()).topk(3, dim=-1)
        right_scores, right_ids = (right @ self.keys[1].t()).topk(3, dim=-1)
        scores = (left_scores.unsqueeze(2) + right_scores.unsqueeze(1)).flatten(1)
        ids = (left_ids.unsqueeze(2) * 6 + right_ids.unsqueeze(1)).flatten(1)
        best, place = scores.topk(3, dim=-1)
        weights = best.softmax(-1)
        return functional.embedding_bag(
            ids.gather(1, place), self.values, per_sample_weights=weights, mode="sum"
        )


class NearestMemory(nn.Module):
    """Gathers the rows of the best keys and sums them by weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(12, width))
        self.values = nn.Parameter(torch.randn(12, width))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.keys.t()).softmax(-1).topk(3)
        return torch.einsum("tkd,tk->td", self.values[ids], weights)


class TopKAttention(nn.Module):
    """A map of the best keys of each query masks the scores of attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.t()
        chosen = torch.zeros_like(scores).int().scatter(1, scores.topk(4)[1], 1).bool()
        return scores.masked_fill(~chosen, float("-inf")).softmax(-1) @ value


class HashAttention(nn.Module):
    """Sorts tokens into buckets of a fixed size by hash and attends within each bucket."""

    def __init__(self, width: int = 16, buckets: int = 4) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(width, buckets))

    def forward(self, x: Tensor) -> Tensor:
        buckets, size = self.projection.shape[1], 6
        bucket = (x @ self.projection).argmax(-1, keepdim=True).flatten()
        sorted_bucket, order = torch.sort(bucket, stable=True)
        counts = functional.one_hot(bucket, buckets).sum(0)
        start = torch.cumsum(counts, 0) - counts
        place = torch.arange(x.shape[0]) - start[sorted_bucket]
        keep = place < size
        slot = torch.where(keep, sorted_bucket * size + place, buckets * size)
        buffer = torch.zeros(buckets * size + 1, x.shape[1]).index_add(0, slot, x[order])
        rows = buffer[:-1].view(buckets, size, -1)
        attention = torch.bmm(rows, rows.transpose(1, 2)).softmax(-1)
        y = torch.bmm(attention, rows).view(-1, x.shape[1])
        y = torch.cat([y, torch.zeros(1, x.shape[1])])[slot] * keep.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order, y)


class MaskedTokensOnly(nn.Module):
    """Runs a head on the masked tokens and puts its rows in their places."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[mask > 0] = self.head(x[mask > 0])
        return out


class RouteByVote(nn.Module):
    """Tokens sorted by their best class, one network for all, weighted and put back."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.classes = nn.Linear(width, 4)
        self.network = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.classes(x).softmax(-1).topk(2)
        order = torch.sort(ids.view(-1), stable=True)[1]
        y = self.network(x[order // 2]) * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, y)


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
    (BucketLoop, lambda: (_rows(),)),
    (HeadPerClass, lambda: (_rows(), torch.randint(4, (16,)))),
    (AdapterPerRequest, lambda: (_rows(), torch.randint(5, (16,)))),
    (NetworkPerModality, lambda: (_rows(), torch.randint(3, (16,)))),
    (OneHotPositions, lambda: (_rows(), torch.randint(2, (16,)))),
    (PackSequences, lambda: (_rows(), torch.randint(2, (16,)))),
    (SegmentMean, lambda: (_rows(), torch.randint(6, (16,)))),
    (KMeansUpdate, lambda: (_rows(),)),
    (MixtureOfSoftmaxes, lambda: (_rows(),)),
    (SoftMoe, lambda: (_rows(),)),
    (ProductKeyMemory, lambda: (_rows(),)),
    (NearestMemory, lambda: (_rows(),)),
    (TopKAttention, lambda: (_rows(), _rows(), _rows())),
    (HashAttention, lambda: (_rows(),)),
    (MaskedTokensOnly, lambda: (_rows(), torch.randint(2, (16,)))),
    (RouteByVote, lambda: (_rows(),)),
]
