"""Routers as people write them, each before the same experts.

A router is a function of the module (for its ``bias``) and the logits ``[T, E]``, and returns
weights and ids ``[T, K]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401  registers transformers::grouped_mm_fallback
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INNER, EXPERTS, TOP_K, GROUPS, KEPT = 8, 4, 12, 3, 4, 2
SIZE = EXPERTS // GROUPS

Router = Callable[["RoutedMoe", Tensor], tuple[Tensor, Tensor]]
grouped_mm = torch.ops.transformers.grouped_mm_fallback


class RoutedMoe(nn.Module):
    """Experts behind a router; returns the output, and what `also` makes of the router's parts."""

    def __init__(self, router: Router, experts: int = EXPERTS) -> None:
        super().__init__()
        self.router = router
        self.bias = nn.Parameter(torch.randn(experts) * 0.5)
        self.w1 = nn.Parameter(torch.randn(experts, HIDDEN, INNER) * 0.3)
        self.w2 = nn.Parameter(torch.randn(experts, INNER, HIDDEN) * 0.3)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = self.router(self, logits)
        slots, top_k = ids.reshape(-1), ids.shape[-1]
        order = torch.sort(slots, stable=True)[1]
        counts = torch.zeros(len(self.w1), dtype=torch.long, device=x.device)
        ends = counts.scatter_add(0, slots, torch.ones_like(slots)).cumsum(0).to(torch.int32)
        rows = functional.silu(grouped_mm(x[order // top_k], self.w1, offs=ends))
        rows = grouped_mm(rows, self.w2, offs=ends)
        combined = rows[torch.argsort(order)].view(*ids.shape, HIDDEN) * weights.unsqueeze(-1)
        return combined.sum(-2)


def group_mask(ranking: Tensor, largest: bool = False) -> Tensor:
    """Return 1 where an expert's group is among the best, ``[T, E]``."""
    groups = ranking.view(-1, GROUPS, SIZE)
    scores = groups.amax(-1) if largest else groups.topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(scores, k=KEPT, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(scores).scatter_(1, best, 1)
    return mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS)


def _renormalised(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(-1).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True), ids


def _in_place(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, dim=1, dtype=torch.float), TOP_K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, ids


def _by_methods(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = functional.softmax(logits, dim=-1).topk(TOP_K, dim=-1, sorted=False)
    weights.div_(weights.sum(-1).unsqueeze(-1).add(1e-9))
    weights.mul_(2.5)
    return weights, ids


def _clamped(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) * 1.5, ids


def _p_norm(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(dim=1).topk(TOP_K)
    return weights / torch.norm(weights, p=2, dim=-1, keepdim=True), ids


def _other_divisor(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    weights, ids = scores.topk(TOP_K)
    return weights / scores.sum(-1, keepdim=True), ids


def _detached_divisor(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True).detach(), ids


def _argmax(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    ids = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, ids), ids


def _max(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).max(dim=-1, keepdim=True)
    return weights, ids


def _scattered(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(TOP_K, dim=-1)
    dense = torch.full_like(logits, float("-inf")).scatter(-1, ids, values).softmax(-1)
    return dense.gather(-1, ids), ids


def _sigmoid_bias(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    _, ids = torch.topk(scores + m.bias, TOP_K, dim=-1, sorted=False)
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def _sigmoid_bias_by_rows(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    ids = (scores.detach() + m.bias.unsqueeze(0)).topk(TOP_K)[1]
    weights = scores[torch.arange(len(ids), device=ids.device)[:, None], ids]
    return weights / weights.sum(-1, keepdim=True), ids


def _sigmoid_no_grad(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    with torch.no_grad():
        ids = (scores + m.bias).topk(TOP_K)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6), ids


def _sigmoid_undivided(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = (scores + m.bias).topk(TOP_K)[1]
    return scores.gather(1, ids) * 2.0, ids


def _softmax_bias_clamp(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    ids = torch.topk(scores + m.bias, TOP_K, dim=-1)[1]
    weights = scores.gather(dim=-1, index=ids)
    return weights / torch.clamp(weights.sum(-1, keepdim=True), min=1e-12), ids


def _deepseek_v3(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ranking = scores + m.bias
    masked = ranking.masked_fill(~group_mask(ranking).bool(), float("-inf"))
    ids = torch.topk(masked, k=TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, ids


def _deepseek_official(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = original = logits.sigmoid()
    scores = (scores + m.bias).view(logits.size(0), GROUPS, -1)
    group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
    best = group_scores.topk(KEPT, dim=-1)[1]
    mask = scores.new_ones(logits.size(0), GROUPS, dtype=torch.bool).scatter_(1, best, False)
    scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
    ids = torch.topk(scores, TOP_K, dim=-1)[1]
    weights = original.gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) * 1.5, ids


def _deepseek_v2(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    mask = group_mask(scores, largest=True)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=TOP_K, dim=-1, sorted=False)
    return weights * 16.0, ids


def _grouped_by_where(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ranking = scores + m.bias
    groups = ranking.view(-1, GROUPS, SIZE)
    best = groups.max(dim=-1).values.topk(KEPT, dim=-1).indices
    mask = torch.zeros(len(logits), GROUPS, device=logits.device).scatter(1, best, 1.0)
    mask = mask.repeat_interleave(SIZE, dim=1) > 0
    ids = torch.where(mask, ranking, -torch.inf).topk(TOP_K)[1]
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True), ids


def _grouped_by_product(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    weights, ids = (scores * group_mask(scores)).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True), ids


LOWERED: dict[str, tuple[str, Router]] = {
    "softmax-topk": ("MoeGatingTopKSoftmax", lambda m, z: z.softmax(-1).topk(TOP_K)),
    "renormalised": ("MoeGatingTopK", lambda m, z: _renormalised(z)),
    "in-place": ("MoeGatingTopK", _in_place),
    "by-methods": ("MoeGatingTopK", _by_methods),
    "clamped": ("MoeGatingTopK", _clamped),
    "p-norm": ("MoeGatingTopKSoftmax", _p_norm),
    "other-divisor": ("MoeGatingTopKSoftmax", _other_divisor),
    "detached-divisor": ("MoeGatingTopKSoftmax", _detached_divisor),
    "argmax": ("MoeGatingTopKSoftmax", _argmax),
    "max": ("MoeGatingTopKSoftmax", _max),
    "topk-softmax": (
        "MoeGatingTopKSoftmaxV2",
        lambda m, z: (lambda top: (top[0].softmax(-1), top[1]))(z.topk(TOP_K)),
    ),
    "scattered": ("MoeGatingTopKSoftmaxV2", _scattered),
    "sigmoid-bias": ("MoeGatingTopK", _sigmoid_bias),
    "sigmoid-bias-by-rows": ("MoeGatingTopK", _sigmoid_bias_by_rows),
    "sigmoid-no-grad": ("MoeGatingTopK", _sigmoid_no_grad),
    "sigmoid-undivided": ("MoeGatingTopK", _sigmoid_undivided),
    "softmax-bias-clamp": ("MoeGatingTopK", _softmax_bias_clamp),
    "deepseek-v3": ("MoeGatingTopK", _deepseek_v3),
    "deepseek-official": ("MoeGatingTopK", _deepseek_official),
    "deepseek-v2": ("MoeGatingTopK", _deepseek_v2),
    "grouped-by-where": ("MoeGatingTopK", _grouped_by_where),
    "grouped-by-product": ("MoeGatingTopK", _grouped_by_product),
}
"""Name -> the op that it becomes, and the router."""


def _smallest(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1).topk(TOP_K, largest=False)


def _two_choices(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    first = scores.argmax(-1, keepdim=True)
    second = scores.scatter(-1, first, -1.0).argmax(-1, keepdim=True)
    ids = torch.cat([first, second], -1)
    return scores.gather(-1, ids), ids


def _rounded_scores(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.bfloat16().softmax(-1).topk(TOP_K)


def _biased_weights(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = (logits.sigmoid() + m.bias).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True), ids


def _undivided(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.sigmoid().topk(TOP_K)


def _sigmoid_of_chosen(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(TOP_K)
    return values.sigmoid(), ids


def _grouped(
    interleaved: bool = False,
    inverted: bool = False,
    fill: float = float("-inf"),
    other_scores: bool = False,
    mean: bool = False,
) -> Router:
    """Return a router by groups with something wrong."""

    def route(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranking = scores + m.bias
        groups = (scores if other_scores else ranking).view(-1, GROUPS, SIZE)
        group_scores = groups.mean(-1) if mean else groups.topk(2, dim=-1)[0].sum(-1)
        best = group_scores.topk(KEPT, dim=-1)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1)
        if interleaved:
            mask = mask.unsqueeze(1).expand(-1, SIZE, GROUPS).reshape(-1, EXPERTS)
        else:
            mask = mask.unsqueeze(2).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS)
        mask = mask.bool() if inverted else ~mask.bool()
        ids = ranking.masked_fill(mask, fill).topk(TOP_K)[1]
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True), ids

    return route


STAY: dict[str, tuple[str, Router]] = {
    "smallest": ("router-choice", _smallest),
    "two-choices": ("router-choice", _two_choices),
    "rounded-scores": ("router-dtype", _rounded_scores),
    "biased-weights": ("router-users", _biased_weights),
    "undivided": ("router-weights", _undivided),
    "sigmoid-of-chosen": ("router-weights", _sigmoid_of_chosen),
    "interleaved-groups": ("router-groups", _grouped(interleaved=True)),
    "worst-groups": ("router-groups", _grouped(inverted=True)),
    "zeros-with-bias": ("router-groups", _grouped(fill=0.0)),
    "groups-without-bias": ("router-groups", _grouped(other_scores=True)),
    "groups-by-mean": ("router-groups", _grouped(mean=True)),
}
"""Name -> the check that keeps it, and the router."""
