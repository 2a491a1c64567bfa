"""Every family of transformers whose experts run as grouped products becomes fused routing ops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests.passes.capturing import compile_rewritten, result_and_gradients
from tests.passes.families import FAMILIES, HIDDEN, TOP_K, Family

ROUTING_OPS = {"sort", "histc", "cumsum", "floordiv", "setitem", "arange", "empty_like"}

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model)


FORMS = {"grouped_mm": "sorted-grouped", "batched_mm": "gathered-weights"}
"""Implementation of the experts -> form of the layer."""

implementations = pytest.mark.parametrize("experts", FORMS)


def assert_rewritten(
    capture, family: Family, experts: str = "grouped_mm", gates: int | None = None
) -> None:
    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    assert layer.form == FORMS[experts]
    assert layer.fx_nodes_after < layer.fx_nodes_before
    ops = capture.ops
    assert ops["moe_init_routing_v2"] == 1
    assert ops["moe_finalize_routing_v2"] == 1
    assert ops["grouped_matmul_single"] == family.products
    assert ops["swi_glu"] == (family.gates if gates is None else gates)
    assert not {"grouped_mm_fallback", "_grouped_mm", "sort", "histc", "setitem", "bmm"} & set(ops)


@implementations
@families
def test_fp32_block_equals_eager_with_gradients(family: Family, experts: str) -> None:
    block = family.build(experts=experts).eval()
    x = torch.randn(2, 9, HIDDEN)
    expected, expected_gradients = result_and_gradients(block, block, x)
    compiled, capture = compile_rewritten(block)
    result, gradients = result_and_gradients(compiled, block, x)

    assert_rewritten(capture, family, experts)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@implementations
@families
def test_bf16_block_is_as_close_to_fp32_as_eager(family: Family, experts: str) -> None:
    block = family.build(torch.bfloat16, experts).eval()
    x = torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16)
    compiled, capture = compile_rewritten(block)
    with torch.no_grad():
        expected, result = block(x), compiled(x)
    expected, result = (r[0] if isinstance(r, tuple) else r for r in (expected, result))

    assert_rewritten(capture, family, experts, family.gates * family.gates_in_bf16)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6 * expected.abs().max())


@implementations
@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_one_dynamic_graph_serves_every_token_count(model: str, experts: str) -> None:
    family = next(f for f in FAMILIES if f.model == model)
    block = family.build(experts=experts).eval()
    compiled, capture = compile_rewritten(block, dynamic=True)
    for tokens in (2, 3, 5, 7, 12, 31, 64):
        x = torch.randn(1, tokens, HIDDEN)
        result, expected = compiled(x), block(x)
        if isinstance(result, tuple):
            result, expected = result[0], expected[0]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)

    assert len(capture.modules) <= 2
    assert [layer.status for layer in capture.layers] == ["rewritten"] * len(capture.modules)


@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe", "minimax"])
def test_training_mode(model: str) -> None:
    family = next(f for f in FAMILIES if f.model == model)
    block = family.build().train()
    x = torch.randn(2, 9, HIDDEN)
    expected, expected_gradients = result_and_gradients(block, block, x)
    compiled, capture = compile_rewritten(block)
    result, gradients = result_and_gradients(compiled, block, x)

    assert_rewritten(capture, family)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_report_names_layer_line_and_router() -> None:
    block = FAMILIES[0].build().eval()
    compiled, capture = compile_rewritten(block)
    compiled(torch.randn(2, 9, HIDDEN))

    (layer,) = capture.layers
    assert layer.path == "experts"
    assert layer.router == "softmax-topk"
    file, _, line = layer.source.rpartition(":")
    path = Path(transformers.__file__).parents[1] / file
    assert "torch.sort" in path.read_text().splitlines()[int(line) - 1]


def test_nodes_outside_the_layer_are_untouched() -> None:
    block = next(f for f in FAMILIES if f.model == "deepseek_v3").build().eval()
    compiled, capture = compile_rewritten(block)
    compiled(torch.randn(2, 9, HIDDEN))

    (gm,) = capture.modules
    new = [n for n in gm.graph.nodes if "moe_graph_layer" in n.meta.get("custom", {})]
    kept = [n for n in gm.graph.nodes if n not in new]
    names_before = [line.split(" ")[0].lstrip("%") for line in capture.before[0]]
    names_kept = [n.name for n in kept if n.op != "output"]
    assert [name for name in names_before if name in names_kept] == names_kept
    assert sum(n.op == "call_function" and n.target is torch._C._nn.linear for n in kept) == 4


def test_new_nodes_carry_shape_origin_and_layer() -> None:
    block = FAMILIES[0].build().eval()
    compiled, capture = compile_rewritten(block, dynamic=True)
    compiled(torch.randn(2, 9, HIDDEN))

    (gm,) = capture.modules
    new = [n for n in gm.graph.nodes if n.meta.get("custom", {}).get("moe_graph_layer")]
    assert new
    for node in new:
        assert node.meta["custom"]["moe_graph_layer"] == "experts"
        assert "example_value" in node.meta
        assert node.meta["nn_module_stack"]
        assert node.meta["stack_trace"]
    final = next(n for n in new if "finalize" in n.name).meta["example_value"]
    tokens = next(n for n in gm.graph.nodes if n.name == "hidden_states").meta["example_value"]
    assert final.shape[0] == tokens.shape[0]
    assert str(final.shape[0]) == str(tokens.shape[0])
    assert TOP_K == 2


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_expert_or_all_experts_per_token(top_k: int, tokens: int) -> None:
    family = replace(FAMILIES[0], settings={"num_experts_per_tok": top_k})
    block = family.build().eval()
    x = torch.randn(1, tokens, HIDDEN)
    expected, expected_gradients = result_and_gradients(block, block, x)
    compiled, capture = compile_rewritten(block)
    result, gradients = result_and_gradients(compiled, block, x)

    assert_rewritten(capture, family)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)
