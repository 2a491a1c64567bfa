"""MoE blocks of transformers, small and random, with experts that run as grouped products."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

HIDDEN, EXPERTS, TOP_K = 32, 8, 2

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_k": TOP_K,
    "moe_topk": TOP_K,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 2,
}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model: module name in ``transformers.models``.
        block: class of the MoE block.
        config: class of its settings.
        products: grouped products of its experts.
        gates: products with a gate that SwiGlu computes.
        gates_in_bf16: in bfloat16 too; False where the source computes the gate in float32.
        arguments: of the block's constructor after the config.
        settings: what differs from the common settings.
    """

    model: str
    block: str
    config: str
    products: int = 2
    gates: int = 1
    gates_in_bf16: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def build(
        self, dtype: torch.dtype = torch.float32, experts: str = "grouped_mm"
    ) -> torch.nn.Module:
        """Return the block with small random weights."""
        modeling = importlib.import_module(
            f"transformers.models.{self.model}.modeling_{self.model}"
        )
        configuration = importlib.import_module(
            f"transformers.models.{self.model}.configuration_{self.model}"
        )
        config = getattr(configuration, self.config)(**(_COMMON | self.settings))
        config._experts_implementation = experts
        torch.manual_seed(0)
        block = getattr(modeling, self.block)(config, **self.arguments).to(dtype)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        for buffer in block.buffers():
            if buffer.is_floating_point():
                torch.nn.init.normal_(buffer, std=0.1)
        return block


FAMILIES = [
    Family("mixtral", "MixtralSparseMoeBlock", "MixtralConfig"),
    Family("minimax", "MiniMaxSparseMoeBlock", "MiniMaxConfig"),
    Family("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig"),
    Family("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig"),
    Family("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig"),
    Family("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config"),
    Family("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config"),
    Family("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig"),
    Family("flex_olmo", "FlexOlmoSparseMoeBlock", "FlexOlmoConfig"),
    Family("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig"),
    Family("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig"),
    Family("jamba", "JambaSparseMoeBlock", "JambaConfig"),
    Family("gpt_oss", "GptOssMLP", "GptOssConfig", gates=0),
    Family("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig"),
    Family("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Moe", "HunYuanMoEV1Config", arguments={"layer_idx": 0}),
    Family("dots1", "Dots1MoE", "Dots1Config", settings={"n_shared_experts": 1}),
    Family("lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig"),
    Family("bailing_hybrid", "BailingHybridMoE", "BailingHybridConfig"),
    Family("nemotron_h", "NemotronHMoE", "NemotronHConfig", gates=0),
    Family("afmoe", "AfmoeSparseMoeBlock", "AfmoeConfig"),
    Family("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config"),
    Family("solar_open", "SolarOpenMoE", "SolarOpenConfig"),
    Family("hy_v3", "HYV3MoE", "HYV3Config"),
    Family("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeConfig"),
    Family("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashConfig"),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterMLP", "OpenAIPrivacyFilterConfig", gates=0),
    Family("muse_spark", "MuseSparkMoE", "MuseSparkTextConfig"),
    Family("beam", "BeamMoE", "BeamConfig", gates_in_bf16=False),
]
