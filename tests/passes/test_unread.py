"""Layers that no form fits are named, each once, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.passes.capturing import compile_rewritten
from tests.passes.handwritten import HIDDEN, HandwrittenMoe
from tests.passes.styles import STYLES, Style

UNREAD = [style for style in STYLES if style.pattern in ("P8", "P9", "P10")]


@pytest.mark.parametrize("style", UNREAD, ids=lambda style: style.name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_that_no_form_fits_is_named(style: Style, dynamic: bool) -> None:
    module = style.build()
    compiled, capture = compile_rewritten(module, dynamic=dynamic)
    x = style.tokens(12)
    torch.testing.assert_close(compiled(x), module(x))
    (layer,) = capture.layers
    assert layer.status == "kept"
    assert [reason.check for reason in layer.reasons] == ["form"]
    assert "tests/passes/styles/" in layer.source
    assert capture.after == capture.before


class Residual(nn.Module):
    """Layers behind one another, each added to what came in."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_each_layer_is_spoken_of_once() -> None:
    style = next(style for style in STYLES if style.name == "NanoMoe")
    module = Residual(HandwrittenMoe(), style.build(), HandwrittenMoe(), style.build())
    compiled, capture = compile_rewritten(module)
    x = torch.randn(12, HIDDEN)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    statuses = [layer.status for layer in capture.layers]
    assert statuses == ["rewritten", "kept", "rewritten", "kept"]
