"""The ops of `routing_ops.py`, each with the compositions of PyTorch ops that give its result.

T tokens, K experts per token, H hidden size, E experts. Inputs are bfloat16, routing is random and
without duplicates in a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_graph import ops

EXPERTS, TOP_K = 64, 8
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op on inputs that are ready.

    Attributes:
        ours: the public function.
        peers: compositions of PyTorch ops for the same result; some sum in another order, and so
            differ in the last bits.
    """

    ours: Call
    peers: tuple[Call, ...]


def _rows(tokens: int, hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, hidden, dtype=torch.bfloat16, generator=generator)


def _ids(tokens: int) -> torch.Tensor:
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(1))
    return scores.topk(TOP_K).indices.to(torch.int32)


def _order(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of the flat ids and its inverse."""
    order = torch.argsort(ids.reshape(-1), stable=True)
    position = torch.arange(order.numel(), dtype=torch.int32)
    return order, torch.empty_like(position).scatter_(0, order, position)


def _in_order(rows: torch.Tensor, row_of: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over k in order, with fp32 sums: the order that the op documents."""
    total = rows.index_select(0, row_of[:, 0]).float().mul_(scales[:, 0:1].float())
    for k in range(1, row_of.shape[1]):
        total += rows.index_select(0, row_of[:, k]).float().mul_(scales[:, k : k + 1].float())
    return total


def _init_routing(tokens: int, hidden: int) -> Case:
    x, ids = _rows(tokens, hidden), _ids(tokens)

    def ours() -> Any:
        flag = ops.moe_init_routing(
            x, ids, expert_num=EXPERTS, expert_tokens_count_or_cumsum_flag=2
        )
        return flag[:3]

    def sort_and_gather() -> Any:
        order, inverse = _order(ids)
        counts = torch.bincount(ids.reshape(-1), minlength=EXPERTS).to(torch.int32)
        return x.index_select(0, order // TOP_K), inverse, counts

    def scatter_rows() -> Any:
        _, inverse = _order(ids)
        rows = torch.empty(tokens * TOP_K, hidden, dtype=x.dtype)
        rows.index_copy_(0, inverse.long(), x.repeat_interleave(TOP_K, 0))
        counts = torch.bincount(ids.reshape(-1), minlength=EXPERTS).to(torch.int32)
        return rows, inverse, counts

    return Case(ours, (sort_and_gather, scatter_rows))


def _init_routing_grad(tokens: int, hidden: int) -> Case:
    grad = _rows(tokens * TOP_K, hidden)
    _, inverse = _order(_ids(tokens))

    def ours() -> Any:
        return (ops.moe_init_routing_grad(grad, inverse, TOP_K),)

    def gather_and_sum() -> Any:
        return (grad.index_select(0, inverse).view(tokens, TOP_K, hidden).sum(1),)

    def bag() -> Any:
        return (torch.nn.functional.embedding_bag(inverse.view(-1, TOP_K), grad, mode="sum"),)

    def tree() -> Any:
        """Add in pairs, the order of A2 and A3 for eight copies."""
        total = grad.index_select(0, inverse).view(tokens, TOP_K, hidden).float()
        while total.shape[1] > 1:
            total = total[:, 0::2] + total[:, 1::2]
        return (total.squeeze(1).bfloat16(),)

    return Case(ours, (gather_and_sum, bag, tree))


def _token_permute(tokens: int, hidden: int) -> Case:
    x, ids = _rows(tokens, hidden), _ids(tokens)

    def sort_and_gather() -> Any:
        order, inverse = _order(ids)
        return x.index_select(0, order // TOP_K), inverse

    return Case(lambda: ops.moe_token_permute(x, ids)[:2], (sort_and_gather,))


def _token_unpermute(tokens: int, hidden: int) -> Case:
    rows = _rows(tokens * TOP_K, hidden)
    _, inverse = _order(_ids(tokens))
    probs = torch.rand(tokens, TOP_K, generator=torch.Generator().manual_seed(2)).bfloat16()

    def gather_and_product() -> Any:
        gathered = rows.index_select(0, inverse).view(tokens, TOP_K, hidden)
        return (torch.bmm(probs.unsqueeze(1), gathered).squeeze(1),)

    def bag() -> Any:
        index = inverse.view(-1, TOP_K)
        return (
            torch.nn.functional.embedding_bag(index, rows, mode="sum", per_sample_weights=probs),
        )

    def in_order() -> Any:
        return (_in_order(rows, inverse.view(-1, TOP_K), probs).bfloat16(),)

    def ours() -> Any:
        return (ops.moe_token_unpermute(rows, inverse, probs),)

    return Case(ours, (gather_and_product, bag, in_order))


def _finalize_routing(tokens: int, hidden: int) -> Case:
    rows, shared = _rows(tokens * TOP_K, hidden), _rows(tokens, hidden)
    _, inverse = _order(_ids(tokens))
    scales = torch.rand(tokens, TOP_K, generator=torch.Generator().manual_seed(2)).bfloat16()

    def ours() -> Any:
        return (ops.moe_finalize_routing(rows, inverse, shared, scales=scales, drop_pad_mode=2),)

    def gather_and_product() -> Any:
        gathered = rows.index_select(0, inverse).view(tokens, TOP_K, hidden)
        return (torch.baddbmm(shared.unsqueeze(1), scales.unsqueeze(1), gathered).squeeze(1),)

    def bag() -> Any:
        index = inverse.view(-1, TOP_K)
        routed = torch.nn.functional.embedding_bag(
            index, rows, mode="sum", per_sample_weights=scales
        )
        return (shared + routed,)

    def in_order() -> Any:
        total = shared.float()
        row_of = inverse.view(-1, TOP_K)
        for k in range(TOP_K):
            total += rows.index_select(0, row_of[:, k]).float().mul_(scales[:, k : k + 1].float())
        return (total.bfloat16(),)

    return Case(ours, (gather_and_product, bag, in_order))


def _gating_softmax(tokens: int, hidden: int) -> Case:
    logits = _rows(tokens, EXPERTS)

    def softmax_and_topk() -> Any:
        weights, ids = torch.softmax(logits.float(), -1).topk(TOP_K)
        return weights.bfloat16(), ids.to(torch.int32)

    return Case(
        lambda: ops.moe_gating_top_k_softmax(logits, k=TOP_K)[:2],
        (softmax_and_topk,),
    )


def _gating_sigmoid_groups(tokens: int, hidden: int) -> Case:
    logits = _rows(tokens, EXPERTS)
    bias = _rows(1, EXPERTS)[0]
    groups, kept_groups = 8, 4

    def ours() -> Any:
        return ops.moe_gating_top_k(
            logits,
            TOP_K,
            bias=bias,
            k_group=kept_groups,
            group_count=groups,
            group_select_mode=1,
            norm_type=1,
            renorm=1,
        )[:2]

    def deepseek() -> Any:
        scores = logits.float().sigmoid()
        choice = scores + bias
        in_groups = choice.view(tokens, groups, -1)
        best = in_groups.topk(2).values.sum(-1).topk(kept_groups).indices
        kept = torch.zeros(tokens, groups).scatter_(1, best, 1).bool()
        ids = in_groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1).topk(TOP_K).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights.bfloat16(), ids.to(torch.int32)

    return Case(ours, (deepseek,))


def _swiglu(tokens: int, hidden: int) -> Case:
    x = _rows(tokens, 2 * hidden)

    def chunks() -> Any:
        gate, up = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up,)

    def rounded_once() -> Any:
        gate, up = x.float().chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * up).bfloat16(),)

    return Case(lambda: (ops.swiglu(x),), (chunks, rounded_once))


CASES: dict[str, Callable[[int, int], Case]] = {
    "moe_init_routing": _init_routing,
    "moe_init_routing_grad": _init_routing_grad,
    "moe_token_permute": _token_permute,
    "moe_token_unpermute": _token_unpermute,
    "moe_finalize_routing": _finalize_routing,
    "moe_gating_top_k_softmax": _gating_softmax,
    "moe_gating_top_k, sigmoid, groups": _gating_sigmoid_groups,
    "swiglu": _swiglu,
}
"""From the number of tokens and the hidden size to a case; its inputs are made then."""
