"""Causal language models of transformers, small and random, with the sizes that the tests need."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 128
MOE_LAYERS = {"mixtral": 2, "qwen3_moe": 2, "deepseek_v3": 1}
"""Model -> how many of its two layers are mixtures of experts."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        _EXPERTS | {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _EXPERTS
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def build(
    name: str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """Return the model on the CPU, for inference; the same arguments give the same weights."""
    config, model, differing = _FAMILIES[name]
    torch.manual_seed(seed)
    made = model(config(attn_implementation=attention, **(_COMMON | differing | settings)))
    return made.to(dtype).eval()


def token_ids(batch: int = 2, tokens: int = 16, seed: int = 1) -> torch.Tensor:
    """Return random token ids [batch, tokens] on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)
