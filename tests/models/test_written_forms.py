"""However a layer is written, its GE graph is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import moe_graph
from tests.passes.capturing import result_and_gradients
from tests.passes.forms import OTHERS, SORTED
from tests.passes.handwritten import HIDDEN, TOKENS, HandwrittenMoe

GAPS = {
    "GatheredEinsum": "P6: the body keeps the shape [T, K, I], at the price of two Reshape",
}
"""Form -> why its graph is another one."""

FORMS = [
    *(
        pytest.param(functools.partial(HandwrittenMoe, **pieces), id=f"sorted-{i}")
        for i, pieces in enumerate(SORTED)
    ),
    *(
        pytest.param(
            form,
            id=form.__name__,
            marks=[pytest.mark.xfail(strict=True, reason=GAPS[form.__name__])]
            if form.__name__ in GAPS
            else [],
        )
        for form in OTHERS
    ),
]


def build(form: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(form())  # a layer is counted by its path, and a lone module has none


def ge_nodes(form: Callable[[], nn.Module]) -> list[dict[str, int]]:
    """Return the GE nodes of a layer in inference and in training; its results are checked."""
    torch._dynamo.reset()
    x, eager, module = torch.randn(TOKENS, HIDDEN), build(form), build(form).npu()
    backend = moe_graph.npu_backend(moe_graph.Config(on_miss="error"))
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.npu()).cpu(), eager(x), rtol=1e-5, atol=1e-5)
    expected, expected_gradients = result_and_gradients(eager, eager, x)
    result, gradients = result_and_gradients(compiled, module, x.npu())
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name].cpu(), gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert [layer.status for layer in backend.report.layers] == ["rewritten"] * 2
    return [layer.ge_nodes for layer in backend.report.layers]


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, int]]:
    inference, training = ge_nodes(HandwrittenMoe)
    assert inference["MoeInitRoutingV2"] == training["MoeInitRoutingV2Grad"] == 1
    return [inference, training]


@pytest.mark.parametrize("form", FORMS)
def test_written_form_gives_the_same_ge_nodes(form, wanted: list[dict[str, int]]) -> None:
    assert ge_nodes(form) == wanted
