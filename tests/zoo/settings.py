"""Small values for the settings of every family, and what a family wants besides."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96

WITHOUT_EMBEDDING = {"Qwen3OmniMoeTalkerModel"}
"""Models that are called with hidden states."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "attention_dropout": 0.0,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 64,
    "rel_extent": 64,
    "moe_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "share_expert_dim": 16,
    "router_hidden_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "global_head_dim": 8,
    # state-space and linear-attention layers
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    # encoders with decoders
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_sparse_step": 2,
    "expert_capacity": 4,
}

_LATENT_ATTENTION = {"num_key_value_heads": 4}

_FAMILIES: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"mlp_layer_types": ["moe", "hash_moe"]},
    "diffusion_gemma": {"top_k_experts": 2},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {"enable_moe_block": True, "top_k_experts": 2},
    "glm4v_moe": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "glm5_next": {
        "index_kpool": 4,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "hy_v4_vl": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 4},
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": {"shared_expert_intermediate_size": 16},
    "step3p7": {"mlp_layer_types": ["dense", "sparse"]},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def settings_of(name: str, fields: set[str]) -> dict[str, Any]:
    """Return the settings of a family, of those in `fields`."""
    settings = {key: value for key, value in COMMON.items() if key in fields}
    if "kv_lora_rank" in fields:
        settings |= _LATENT_ATTENTION
    return settings | _FAMILIES.get(name, {})
