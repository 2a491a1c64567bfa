"""A graph break in a loop over experts is in the report, with the loop's line and a hint."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import Tensor, nn

from moe_graph import Config, KeptLayerError, npu_backend, prepare
from tests.frontends.left_alone import HIDDEN, Carried
from tests.passes.styles import STYLES
from tests.passes.styles.parts import Style

TOKENS = 12


def _style(name: str) -> Style:
    return next(style for style in STYLES if style.name == name)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("MakeMoe", "for i, expert in enumerate(self.experts):"),
        ("DeepseekV3Official", "for i in range(EXPERTS):"),
        ("DeepseekV2Inference", "for i, number in enumerate(numbers):"),
        ("VllmTorchMoe", "for i in range(EXPERTS):"),
    ],
)
def test_an_unprepared_loop_is_reported_with_prepare_as_the_hint(name: str, loop: str) -> None:
    style, backend = _style(name), npu_backend(Config(on_miss="ignore"))
    layer, x = style.build().to("npu"), style.tokens(TOKENS).to("npu")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    (report,) = backend.report.layers
    (reason,) = report.reasons
    assert (report.status, report.form, reason.check) == ("kept", "expert-loop", "graph-break")
    assert "moe_graph.prepare(model)" in reason.hint
    assert reason.node == loop
    file, _, line = report.source.rpartition(":")
    assert linecache.getline(file, int(line)).strip() == loop


def test_a_loop_that_cannot_be_lifted_is_reported_as_well() -> None:
    backend = npu_backend(Config(on_miss="ignore"))
    layer, x = prepare(Carried()).to("npu"), torch.randn(TOKENS, HIDDEN).to("npu")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    assert [report.reasons[0].check for report in backend.report.layers] == ["graph-break"]


def test_on_miss_error_raises_it() -> None:
    style, backend = _style("MakeMoe"), npu_backend(Config(on_miss="error"))
    layer, x = style.build().to("npu"), style.tokens(TOKENS).to("npu")
    with torch.no_grad(), pytest.raises(Exception, match="graph-break") as raised:
        torch.compile(layer, backend=backend)(x)
    assert isinstance(getattr(raised.value, "inner_exception", None), KeptLayerError)


def test_a_prepared_layer_breaks_nothing() -> None:
    style, backend = _style("MakeMoe"), npu_backend(Config(on_miss="error"))
    layer, x = prepare(style.build()).to("npu"), style.tokens(TOKENS).to("npu")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    assert backend.report.graphs == 1
    assert [report.status for report in backend.report.layers] == ["rewritten"]


def test_breaks_elsewhere_are_not_reported() -> None:
    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for row in x.split(1):
                if row.sum() > 0:
                    x = x + row
            return x

    backend = npu_backend(Config(on_miss="error"))
    x = torch.randn(3, 4).to("npu")
    torch.testing.assert_close(torch.compile(Skips(), backend=backend)(x), Skips()(x))
    assert backend.report.layers == []
