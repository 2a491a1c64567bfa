"""P6 and P7: weights gathered by slot, or every expert on every token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, WithStack


class GptFastGather(WithStack):
    """The weights of each slot's expert, gathered, and einsums over them."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        gate = functional.silu(torch.einsum("ti,taoi->tao", x, self.w1[ids]))
        up = torch.einsum("ti,taoi->tao", x, self.w3[ids])
        y = torch.einsum("tao,taio->tai", gate * up, self.w2[ids])
        return torch.einsum("tai,ta->ti", y, weights)


class BatchedGather(WithStack):
    """The same by slot and with batched matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat, copies = ids.reshape(-1), x.repeat_interleave(TOP_K, dim=0).unsqueeze(-1)
        gate = torch.bmm(self.w1[flat], copies).squeeze(-1)
        up = torch.bmm(self.w3[flat], copies).squeeze(-1)
        y = torch.bmm(self.w2[flat], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(dim=1)


class Llama4Dense(WithStack):
    """Every expert on every token; a score that is zero but at the top-k multiplies the input."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        values, ids = torch.topk(logits, TOP_K, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        scores = torch.sigmoid(scores.float()).to(x.dtype)
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        y = self.batched(rows.view(EXPERTS, -1, HIDDEN)).reshape(-1, HIDDEN)
        return y.view(EXPERTS, -1, HIDDEN).sum(dim=0)


class DenseEinsum(WithStack):
    """Einsums over all experts; gates that are zero but at the top-k."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        gates = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter(1, ids, weights)
        hidden = functional.silu(torch.einsum("td,eid->tei", x, self.w1))
        hidden = hidden * torch.einsum("td,eid->tei", x, self.w3)
        y = torch.einsum("tei,edi->ted", hidden, self.w2)
        return torch.einsum("ted,te->td", y, gates)


class DenseEinsumSmallGates(WithStack):
    """The gates of the other experts are small, and nothing says that they are zero."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOP_K, dim=1)[1], 1).bool()
        gates = logits.masked_fill(~chosen, -4.0).softmax(dim=-1)
        hidden = functional.silu(torch.einsum("td,eid->tei", x, self.w1))
        hidden = hidden * torch.einsum("td,eid->tei", x, self.w3)
        y = torch.einsum("tei,edi->ted", hidden, self.w2)
        return torch.einsum("ted,te->td", y, gates)


class VllmIterative(WithStack):
    """A loop over the experts, each on all tokens, with a weight that is mostly zero."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        final: Tensor | None = None
        for i in range(EXPERTS):
            weight = (weights * (ids == i)).sum(dim=-1, keepdim=True)
            gate = functional.silu(functional.linear(x, self.w1[i]))
            y = functional.linear(gate * functional.linear(x, self.w3[i]), self.w2[i])
            final = y * weight if final is None else final + y * weight
        assert final is not None
        return final
