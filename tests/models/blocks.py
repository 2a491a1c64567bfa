"""A mixture-of-experts block of Mixtral, small and random, for what does not need a whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

HIDDEN, EXPERTS = 32, 4


def moe_block(experts: str = "grouped_mm") -> MixtralSparseMoeBlock:
    """Return the block on the CPU; `experts` names an implementation of transformers."""
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = experts
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block


def tokens(batch: int = 2, length: int = 5) -> torch.Tensor:
    """Return random hidden states [batch, length, HIDDEN] on the CPU."""
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1))


class CentredMoe(nn.Module):
    """A layer that is kept: what the experts compute is centred over the rows of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 24, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 24) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        flat = ids.reshape(-1)
        rows = x.reshape(-1, HIDDEN).repeat_interleave(2, dim=0).unsqueeze(-1)
        hidden = torch.bmm(self.up[flat], rows)
        y = torch.bmm(self.down[flat], (hidden - hidden.mean(dim=0)).relu()).squeeze(-1)
        y = y * weights.reshape(-1, 1)
        return y.view(*x.shape[:-1], 2, HIDDEN).sum(dim=-2)


def kept_block() -> CentredMoe:
    """Return the layer that is kept, on the CPU."""
    torch.manual_seed(0)
    return CentredMoe()
