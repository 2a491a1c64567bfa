"""Whole models of transformers on the emulated device, eager, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
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

transformers.logging.set_verbosity_error()

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = {
        "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "deepseek_v3": lambda: DeepseekV3Config(
            **(SMALL | {"num_key_value_heads": 4}),
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
    }[name]()
    config._attn_implementation = attention
    model = {
        "mixtral": MixtralForCausalLM,
        "qwen3": Qwen3ForCausalLM,
        "qwen3_moe": Qwen3MoeForCausalLM,
        "deepseek_v3": DeepseekV3ForCausalLM,
    }[name]
    return model(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_loss_and_gradients(name: str, attention: str) -> None:
    cpu = build(name, attention)
    npu = copy.deepcopy(cpu).to("npu")
    ids = torch.randint(3, 96, (2, 11))
    want, got = cpu(ids, labels=ids), npu(ids.npu(), labels=ids.npu())
    torch.testing.assert_close(got.logits.cpu(), want.logits, rtol=1e-5, atol=1e-6)
    want.loss.backward()
    got.loss.backward()
    for (path, want_weight), got_weight in zip(
        cpu.named_parameters(), npu.parameters(), strict=True
    ):
        assert (want_weight.grad is None) == (got_weight.grad is None), path
        if want_weight.grad is not None:
            torch.testing.assert_close(
                got_weight.grad.cpu(), want_weight.grad, rtol=1e-4, atol=1e-7, msg=path
            )


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_generate(name: str) -> None:
    cpu = build(name).eval()
    npu = copy.deepcopy(cpu).to("npu")
    ids = torch.randint(3, 96, (2, 6))
    want = cpu.generate(ids, max_new_tokens=8, do_sample=False)
    got = npu.generate(ids.npu(), max_new_tokens=8, do_sample=False)
    assert torch.equal(got.cpu(), want)


def test_sampling_is_reproducible() -> None:
    npu = build("mixtral").eval().to("npu")
    ids = torch.randint(3, 96, (2, 6)).npu()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(npu.generate(ids, max_new_tokens=8, do_sample=True, temperature=2.0).cpu())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_training() -> None:
    cpu = build("mixtral")
    npu = copy.deepcopy(cpu).to("npu")
    ids = torch.randint(3, 96, (2, 11))
    losses = []
    for model, batch in ((cpu, ids), (npu, ids.npu())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        of_model = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            of_model.append(loss.item())
        losses.append(of_model)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
