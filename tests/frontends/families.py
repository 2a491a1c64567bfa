"""MoE blocks of the installed transformers whose experts are a loop in Python, with tiny sizes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 8, 2

_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
_LOCAL = _SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_PLAIN = _SIZES | {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_NARROW = _PLAIN | {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER}
_DEEPSEEK = _SIZES | {
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_JETMOE = {key: size for key, size in _LOCAL.items() if key != "num_attention_heads"}
_LONGCAT = {
    key: size
    for key, size in _SIZES.items()
    if key not in ("intermediate_size", "num_hidden_layers")
} | {
    "ffn_hidden_size": INNER,
    "expert_ffn_hidden_size": INNER,
    "n_routed_experts": EXPERTS,
    "zero_expert_num": 2,
    "moe_topk": TOP_K,
    "num_layers": 1,
}
_ERNIE = _SIZES | {"moe_intermediate_size": INNER, "moe_num_experts": EXPERTS, "moe_k": TOP_K}
_ARIA = _SIZES | {"moe_num_experts": EXPERTS, "moe_topk": TOP_K, "moe_num_shared_experts": 1}
_SWITCH = {"d_model": HIDDEN, "d_ff": INNER, "num_experts": EXPERTS, "expert_capacity": 4}
_NLLB = {key: size for key, size in _SWITCH.items() if key != "d_ff"}
_DBRX = {
    "d_model": HIDDEN,
    "n_heads": 2,
    "n_layers": 1,
    "vocab_size": 32,
    "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    "attn_config": {"kv_n_heads": 2},
}


@dataclass(frozen=True)
class Family:
    """A block.

    Attributes:
        package: its folder among transformers' models.
        config: class of its configuration.
        block: class of the block.
        settings: arguments of the configuration.
        lifted: it has a loop that ``prepare`` lifts; else capture alone makes one graph.
        arguments: further arguments of the block's class.
        inputs: further arguments of a call.
    """

    package: str
    config: str
    block: str
    settings: dict[str, Any]
    lifted: bool = True
    arguments: tuple[Any, ...] = ()
    inputs: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        """Return the block with random weights."""
        module = importlib.import_module(
            f"transformers.models.{self.package}.modeling_{self.package}"
        )
        configuration = importlib.import_module(
            f"transformers.models.{self.package}.configuration_{self.package}"
        )
        config = getattr(configuration, self.config)(**self.settings)
        torch.manual_seed(0)
        block = getattr(module, self.block)(config, *self.arguments)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.3)
        for buffer in block.buffers():
            nn.init.zeros_(buffer)
        return block.eval()

    def call(self, block: Any, x: Tensor) -> Tensor:
        """Return the hidden states that the block, or the block compiled, returns."""
        result = block(x.clone(), *self.inputs)
        return result[0] if isinstance(result, tuple) else result


def tokens() -> Tensor:
    """Return hidden states ``[B, S, H]``."""
    return torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(0))


def _moe(
    package: str,
    prefix: str,
    block: str,
    settings: dict[str, Any],
    lifted: bool = True,
    **options: Any,
) -> Family:
    return Family(package, f"{prefix}Config", f"{prefix}{block}", settings, lifted, **options)


VERSION_4: list[Family] = [
    _moe("mixtral", "Mixtral", "SparseMoeBlock", _LOCAL),
    _moe("qwen2_moe", "Qwen2Moe", "SparseMoeBlock", _NARROW),
    _moe("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", _NARROW),
    _moe("qwen3_next", "Qwen3Next", "SparseMoeBlock", _NARROW),
    Family("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextSparseMoeBlock", _NARROW),
    Family(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTextConfig",
        "Qwen3OmniMoeThinkerTextSparseMoeBlock",
        _NARROW,
    ),
    _moe("deepseek_v2", "DeepseekV2", "MoE", _DEEPSEEK | {"topk_method": "greedy"}),
    _moe("deepseek_v3", "DeepseekV3", "MoE", _DEEPSEEK),
    _moe("glm4_moe", "Glm4Moe", "MoE", _DEEPSEEK),
    Family("glm4v_moe", "Glm4vMoeTextConfig", "Glm4vMoeTextMoE", _DEEPSEEK),
    _moe("dots1", "Dots1", "MoE", _DEEPSEEK),
    _moe("longcat_flash", "LongcatFlash", "MoE", _LONGCAT),
    _moe("olmoe", "Olmoe", "SparseMoeBlock", _PLAIN, lifted=False),
    _moe("flex_olmo", "FlexOlmo", "SparseMoeBlock", _PLAIN, lifted=False),
    _moe("phimoe", "Phimoe", "SparseMoeBlock", _LOCAL),
    _moe("jamba", "Jamba", "SparseMoeBlock", _PLAIN),
    _moe("minimax", "MiniMax", "SparseMoeBlock", _LOCAL),
    _moe("hunyuan_v1_moe", "HunYuanMoEV1", "Moe", _PLAIN | {"moe_topk": TOP_K}),
    _moe("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", _ERNIE),
    _moe("granitemoe", "GraniteMoe", "MoE", _LOCAL, lifted=False),
    _moe("jetmoe", "JetMoe", "MoE", _JETMOE | {"kv_channels": 8}, lifted=False),
    Family("llama4", "Llama4TextConfig", "Llama4TextMoe", _LOCAL, lifted=False),
    _moe("gpt_oss", "GptOss", "MLP", _LOCAL),
    Family("aria", "AriaTextConfig", "AriaTextMoELayer", _ARIA, lifted=False),
    _moe("dbrx", "Dbrx", "FFN", _DBRX),
    _moe("switch_transformers", "SwitchTransformers", "SparseMLP", _SWITCH),
    _moe("nllb_moe", "NllbMoe", "SparseMLP", _NLLB, False, arguments=(INNER,), inputs=(None,)),
]
"""Blocks of transformers 4.57."""

VERSION_5: list[Family] = [
    _moe("dbrx", "Dbrx", "FFN", _DBRX),
    _moe("longcat_flash", "LongcatFlash", "MoE", _LONGCAT),
    _moe("switch_transformers", "SwitchTransformers", "SparseMLP", _SWITCH),
    _moe("nllb_moe", "NllbMoe", "SparseMLP", _NLLB, arguments=(INNER,), inputs=(None,)),
    _moe("jetmoe", "JetMoe", "MoE", _JETMOE | {"kv_channels": 8}, lifted=False),
    Family(
        "step3p7",
        "Step3p7TextConfig",
        "Step3p7SparseMoeBlock",
        _LOCAL | {"moe_intermediate_size": INNER},
        arguments=(0,),
    ),
]
"""Blocks of transformers 5 for which it has no other implementation of experts."""
