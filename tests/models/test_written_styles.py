"""The styles in which people write MoE layers, on the NPU: one GE form, equal to eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import moe_graph
from moe_graph.converters.coverage import LoweringError
from tests.passes.capturing import result_and_gradients
from tests.passes.styles import STYLES, Style
from tests.passes.styles.gaps import GAPS

TOKENS = 12
ROUTING = {
    "Bincount",
    "Histogram",
    "IndexByTensor",
    "IndexPutV2",
    "InplaceIndexAdd",
    "MaskedFill",
    "NonZero",
    "OneHot",
    "ScatterNdAdd",
    "SearchSorted",
    "Sort",
}

rewritten_styles = pytest.mark.parametrize(
    "style",
    [
        pytest.param(
            style,
            id=f"{style.pattern}-{style.name}",
            marks=[
                pytest.mark.xfail(
                    strict=True,
                    raises=(AssertionError, LoweringError, TorchDynamoException),
                    reason=GAPS[style.name],
                )
            ]
            if style.name in GAPS
            else [],
        )
        for style in STYLES
        if style.status == "rewritten"
    ],
)


@rewritten_styles
def test_a_training_step_on_the_npu_equals_eager(style: Style) -> None:
    torch._dynamo.reset()
    eager, x = style.build(), style.tokens(TOKENS)
    module = nn.Sequential(style.build())  # a layer is counted by its path, and a lone one has none
    if style.needs == "prepare":
        module = moe_graph.prepare(module)
    backend = moe_graph.npu_backend(moe_graph.Config(on_miss="error"))
    compiled = torch.compile(module.npu(), backend=backend, fullgraph=True, dynamic=False)
    result, gradients = result_and_gradients(compiled, module, x.npu())
    assert [layer.status for layer in backend.report.layers] == ["rewritten"]

    expected, expected_gradients = result_and_gradients(eager, eager, x)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        got = gradients[name if name == "input" else f"0.{name}"]
        assert got is not None, name
        want = torch.zeros_like(got.cpu()) if gradient is None else gradient
        scale = want.abs().max().item()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4 * scale, msg=name)

    (layer,) = backend.report.layers
    assert not ROUTING & layer.ge_nodes.keys()
    fused = {"MoeInitRoutingV2", "MoeFinalizeRoutingV2", "MoeInitRoutingV2Grad"}
    assert fused <= layer.ge_nodes.keys()
