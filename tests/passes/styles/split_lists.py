"""P5: rows sorted by expert and cut by counts that the host reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, Mlp, WithModules
from tests.passes.styles.sorted_grouped import TorchtitanScoreBefore


class TorchtitanLoop(TorchtitanScoreBefore):
    """The loop over split rows that torchtitan runs where there is no grouped product."""

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, split_size_or_sections=counts.long().tolist(), dim=0)
        outputs = []
        for i, part in enumerate(parts):
            hidden = functional.silu(torch.matmul(part, self.w1[i].transpose(-2, -1)))
            hidden = hidden * torch.matmul(part, self.w3[i].transpose(-2, -1))
            outputs.append(torch.matmul(hidden, self.w2[i].transpose(-2, -1)))
        return torch.cat(outputs, dim=0)


class DeepseekMoeInference(WithModules):
    """Running sums of the counts on the host; results go back by ``scatter_reduce_``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat, flat_weights = ids.view(-1), weights.view(-1, 1)
        cache = torch.zeros_like(x)
        order = flat.argsort()
        ends = flat.bincount(minlength=EXPERTS).cumsum(0).tolist()
        token = order // TOP_K
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            mine = token[start:end]
            y = self.experts[i](x[mine]) * flat_weights[order[start:end]]
            index = mine.view(-1, 1).repeat(1, x.shape[-1])
            cache = cache.scatter_reduce(0, index, y, reduce="sum")
        return cache


class DeepseekV2Inference(WithModules):
    """Slices of the sorted rows; the permutation of the sort puts the results back."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], EXPERTS))
        counts.scatter_(1, ids, 1)
        numbers = counts.sum(dim=0).tolist()
        order = ids.view(-1).argsort()
        rows = x[order // ids.shape[1]]
        outputs, start = [], 0
        for i, number in enumerate(numbers):
            end = start + number
            if number == 0:
                continue
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        y = torch.cat(outputs, dim=0) if outputs else rows.new_empty(0, HIDDEN)
        slots = torch.empty_like(y)
        slots[order] = y
        slots = slots.view(*ids.shape, -1).type(weights.dtype)
        return slots.mul_(weights.unsqueeze(-1)).sum(dim=1).type(y.dtype)


class SparseDispatcher(WithModules):
    """Nonzero gates, sorted by expert; parts by count, stitched and added by token."""

    expert = Mlp

    def forward(self, x: Tensor) -> Tensor:
        values, ids = self.router(x).topk(TOP_K, dim=1)
        gates = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter(
            1, ids, values.softmax(dim=1)
        )
        sorted_experts, order = torch.nonzero(gates).sort(0)
        _, expert_of_row = sorted_experts.split(1, dim=1)
        token = torch.nonzero(gates)[order[:, 1], 0]
        sizes = (gates > 0).sum(0).tolist()
        row_weights = torch.gather(gates[token.flatten()], 1, expert_of_row)
        parts = torch.split(x[token].squeeze(1), sizes, dim=0)
        outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        stitched = torch.cat(outputs, 0).mul(row_weights)
        return torch.zeros(x.shape[0], HIDDEN, device=x.device).index_add(0, token, stitched)


class GraniteSplits(WithModules):
    """Sorted slots, split by counts, one product per expert, added by token."""

    def forward(self, x: Tensor) -> Tensor:
        values, ids = self.router(x).topk(TOP_K, dim=1)
        weights = torch.softmax(values, dim=1).type_as(x)
        gates = torch.zeros(x.shape[0], EXPERTS, dtype=torch.long, device=x.device).scatter(
            1, ids, 1
        )
        sizes = gates.sum(0).tolist()
        _, order = ids.flatten().sort(0)
        token = order.div(TOP_K, rounding_mode="trunc")
        parts = x[token].split(sizes, dim=0)
        outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        y = torch.cat(outputs, dim=0) * weights.flatten()[order][:, None]
        return torch.zeros(x.shape, dtype=y.dtype, device=x.device).index_add(0, token, y)
