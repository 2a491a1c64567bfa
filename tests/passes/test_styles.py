"""The styles in which people write MoE layers: one lowered form each, or the reason why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_graph
from tests.passes.capturing import Capture, compile_rewritten, result_and_gradients
from tests.passes.styles import STYLES, Style
from tests.passes.styles.gaps import GAPS
from tests.passes.styles.parts import EXPERTS, IDLE

ROUTING_OPS = {
    "argsort",
    "bincount",
    "cumsum",
    "histc",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "index_put",
    "masked_select",
    "nonzero",
    "one_hot",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "searchsorted",
    "setitem",
    "sort",
    "split",
    "tolist",
    "item",
}
TOKENS = 12
COUNTS = (7, 3, 33, 64, 2)

DYNAMIC_GAPS: dict[str, str] = {}
"""Style -> why it is served for one number of tokens only."""


def styles(*gaps: dict[str, str], of: Callable[[Style], bool] = lambda _: True) -> Any:
    """Return the mark that runs a test for every style, those with a known gap to fail."""
    reasons: dict[str, str] = functools.reduce(lambda a, b: a | b, gaps, {})
    return pytest.mark.parametrize(
        "style",
        [
            pytest.param(
                style,
                id=f"{style.pattern}-{style.name}",
                marks=[
                    pytest.mark.xfail(
                        strict=True, raises=AssertionError, reason=reasons[style.name]
                    )
                ]
                if style.name in reasons
                else [],
            )
            for style in STYLES
            if of(style)
        ],
    )


def build(style: Style) -> nn.Module:
    module = style.build()
    return moe_graph.prepare(module) if style.needs == "prepare" else module


def check_against_eager(style: Style, function: Callable[..., Any], module: nn.Module) -> None:
    """Compare values, and gradients of the input, the router and all experts."""
    eager, x = style.build(), style.tokens(TOKENS)
    expected, expected_gradients = result_and_gradients(eager, eager, x)
    result, gradients = result_and_gradients(function, module, x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            scale = gradient.abs().max().item()
            torch.testing.assert_close(
                gradients[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=name
            )


def check_idle_expert(gradients: dict[str, Tensor | None]) -> None:
    """The expert without tokens has a gradient, and it is zero."""
    found = 0
    for name, gradient in gradients.items():
        if name.startswith(f"experts.{IDLE}."):
            assert gradient is not None, name
            assert not gradient.any(), name
            found += 1
        elif name in ("w1", "w2", "w3"):
            assert gradient is not None, name
            assert gradient.shape[0] == EXPERTS
            assert not gradient[IDLE].any(), name
            found += 1
    assert found


def check_status(style: Style, capture: Capture) -> None:
    for layer in capture.layers:
        assert layer.status == style.status, "; ".join(map(str, layer.reasons))
    assert capture.layers, "nothing is said of the layer"
    if style.status == "kept":
        assert {layer.reasons[0].check for layer in capture.layers} == {style.check}
        assert capture.after == capture.before
        return
    assert len(capture.layers) == len(capture.modules)
    left = (ROUTING_OPS - style.router_ops) & set(capture.ops)
    assert not left


@styles(of=lambda style: style.needs != "prepare")
def test_the_graph_of_a_style_is_the_style(style: Style) -> None:
    """What the passes are given computes what the module computes, bit for bit, with gradients."""
    graphs: list[torch.fx.GraphModule] = []

    def record(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    module, x, flags = style.build(), style.tokens(TOKENS), style.needs == "flags"
    expected, expected_gradients = result_and_gradients(module, module, x)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=flags, capture_scalar_outputs=flags
    ):
        compiled = torch.compile(module, backend=record)
        result, gradients = result_and_gradients(compiled, module, x)

    assert len(graphs) == 1
    assert torch.equal(result, expected)
    for name, gradient in expected_gradients.items():
        assert gradient is not None, name
        assert torch.equal(gradients[name], gradient), name


@styles(of=lambda style: style.needs != "prepare")
def test_a_style_computes_the_same_after_the_passes(style: Style) -> None:
    module = style.build()
    compiled, capture = compile_rewritten(module, dynamic=False)
    check_against_eager(style, compiled, module)

    if all(layer.status == "kept" for layer in capture.layers):
        assert capture.after == capture.before
    assert all(layer.reasons for layer in capture.layers if layer.status == "kept")


@styles(GAPS)
def test_a_style_is_served(style: Style) -> None:
    module = build(style)
    compiled, capture = compile_rewritten(module, dynamic=False, frontends=True)
    check_against_eager(style, compiled, module)

    check_status(style, capture)
    assert len(capture.modules) == 1
    if style.status == "rewritten":
        check_idle_expert({name: p.grad for name, p in module.named_parameters()})


def works_without_tokens(style: Style) -> bool:
    try:
        style.build()(style.tokens(0))
    except RuntimeError:
        return False
    return True


@styles(GAPS, DYNAMIC_GAPS)
def test_a_style_is_served_for_every_number_of_tokens(style: Style) -> None:
    eager, module = style.build(), build(style)
    compiled, capture = compile_rewritten(module, dynamic=True, frontends=True)

    def graphs_for(*counts: int) -> int:
        before = len(capture.modules)
        for count in counts:
            x = style.tokens(count, seed=count)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)
        return len(capture.modules) - before

    assert graphs_for(*COUNTS) == (style.graphs or len(COUNTS))
    assert graphs_for(1) == 1  # dynamo takes the sizes 0 and 1 for constants
    if works_without_tokens(style):
        assert graphs_for(0) == 1
    check_status(style, capture)
