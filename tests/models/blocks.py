"""A mixture-of-experts block of Mixtral, small and random, for what does not need a whole model."""

from __future__ import annotations

import torch
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
