"""What turns router logits into scores, in fp32, and its gradient."""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.chunks import row_chunks

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(3)


def normalise(x: torch.Tensor, norm_type: int) -> torch.Tensor:
    """Return fp32 scores: 0 softmax over the last dim, 1 sigmoid, 2 square root of softplus."""
    logits = x.to(torch.float32)
    if norm_type == SOFTMAX:
        return torch.softmax(logits, -1)
    if norm_type == SIGMOID:
        return torch.sigmoid(logits)
    # TorchAir has no converter for softplus, and backward passes call this in graphs.
    return torch.sqrt(torch.relu(logits) + torch.log1p(torch.exp(-logits.abs())))


def normalise_in_chunks(x: torch.Tensor, norm_type: int) -> torch.Tensor:
    """:func:`normalise` with the chunks of the kernels: the last bit of exp depends on them."""
    scores = torch.empty(x.shape, dtype=torch.float32)
    for chunk in row_chunks(*x.shape):
        scores[chunk] = normalise(x[chunk], norm_type)
    return scores


def normalise_grad(
    x: torch.Tensor, scores: torch.Tensor, grad: torch.Tensor, norm_type: int
) -> torch.Tensor:
    """Return the fp32 gradient of `x`, given that of ``scores = normalise(x)``."""
    if norm_type == SOFTMAX:
        return scores * (grad - (grad * scores).sum(-1, keepdim=True))
    if norm_type == SIGMOID:
        return grad * scores * (1 - scores)
    slope = torch.sigmoid(x.to(torch.float32)) / (2 * scores)
    # Where the score underflows to 0 (x below -104, masked experts) the quotient is 0 / 0.
    return grad * slope.masked_fill(scores == 0, 0.0)


def divided_grad(grad: torch.Tensor, chosen: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the gradient of `chosen`, given that of ``chosen / (sum(chosen) + eps)``."""
    total = chosen.sum(-1, keepdim=True) + eps
    return (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total


def scatter_to_experts(
    like: torch.Tensor, expert_idx: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return fp32 zeros of the shape of `like` with `values` added at the chosen experts."""
    zeros = torch.zeros_like(like, dtype=torch.float32)
    return zeros.scatter_add(-1, expert_idx.to(torch.int64), values)
