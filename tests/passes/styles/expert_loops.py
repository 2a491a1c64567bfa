"""P4: a Python loop over the experts, each on the tokens that chose it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, Mlp, SwiGlu, WithModules, WithStack


class MistralReference(WithModules):
    """Top-k, then softmax; ``where`` finds the tokens; ``+=`` by index adds the results."""

    def forward(self, x: Tensor) -> Tensor:
        values, ids = torch.topk(self.router(x), TOP_K)
        weights = functional.softmax(values, dim=1, dtype=torch.float).to(x.dtype)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(ids == i)
            results[token] += weights[token, nth, None] * expert(x[token])
        return results


class DeepseekV3Official(WithModules):
    """Sigmoid router; experts that the host counts as empty are skipped; a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SwiGlu()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).sigmoid()
        ids = torch.topk(scores, TOP_K, dim=-1)[1]
        weights = scores.gather(1, ids)
        weights /= weights.sum(dim=-1, keepdim=True)
        return (weights * 2.5).type_as(x), ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            token, top = torch.where(ids == i)
            y[token] += self.experts[i](x[token]) * weights[token, top, None]
        return y + self.shared(x)


class DeepseekRemoteTraining(WithModules):
    """Copies of the tokens by slot; each expert fills in the slots that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        copies = x.repeat_interleave(TOP_K, dim=0)
        y = torch.empty_like(copies)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(copies[flat == i]).to(y.dtype)
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class VllmTorchMoe(WithStack):
    """The same over stacked weights; an emptiness test guards each expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        copies = x.view(x.shape[0], -1, HIDDEN).repeat(1, TOP_K, 1).reshape(-1, HIDDEN)
        out = torch.zeros(x.shape[0] * TOP_K, HIDDEN, dtype=x.dtype, device=x.device)
        flat = ids.view(-1)
        for i in range(EXPERTS):
            mask = flat == i
            if mask.sum():
                out[mask] = self.one(copies[mask], i)
        return (out.view(x.shape[0], -1, HIDDEN) * weights.view(x.shape[0], -1, 1)).sum(dim=1)


class MakeMoe(WithModules):
    """Softmax over logits that are ``-inf`` but at the top-k; ``any`` finds the tokens."""

    expert = Mlp
    test_for_tokens = True

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        values, ids = logits.topk(TOP_K, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, ids, values).softmax(dim=-1)
        final = torch.zeros_like(x)
        flat_x, flat_gates = x.view(-1, x.size(-1)), gates.view(-1, gates.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if not self.test_for_tokens or torch.any(flat_mask):
                y = expert(flat_x[flat_mask])
                final[mask] += (y * flat_gates[flat_mask, i].unsqueeze(1)).squeeze(1)
        return final


class MakeMoeWithoutIf(MakeMoe):
    """The same without the test for tokens."""

    test_for_tokens = False


class OneHotLoop(WithStack):
    """A mask by expert and slot, ``index_add_`` of the weighted rows, for every expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        final = torch.zeros_like(x)
        mask = functional.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for i in range(EXPERTS):
            top, token = torch.where(mask[i])
            y = self.one(x[None, token].reshape(-1, HIDDEN), i) * weights[token, top, None]
            final.index_add_(0, token, y.to(x.dtype))
        return final
