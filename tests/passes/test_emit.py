"""Example values of new nodes: right for each, and computed once for layers that are alike."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from moe_graph.passes import emit
from tests.passes.capturing import compile_rewritten
from tests.passes.handwritten import HIDDEN, TOKENS, HandwrittenMoe


def _fake_kernels_run(layers: int, dynamic: bool) -> int:
    module = nn.Sequential(*(HandwrittenMoe() for _ in range(layers)))
    with mock.patch.object(emit, "_infer", wraps=emit._infer) as infer:
        compiled, capture = compile_rewritten(module, dynamic=dynamic)
        with torch.no_grad():
            compiled(torch.randn(TOKENS, HIDDEN))
    assert [layer.status for layer in capture.layers] == ["rewritten"] * layers
    return infer.call_count


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_that_are_alike_cost_the_fake_kernels_of_one(dynamic: bool) -> None:
    one = _fake_kernels_run(1, dynamic)
    assert one > 0
    assert _fake_kernels_run(4, dynamic) == one


def test_every_new_node_carries_what_tracing_would_have_left() -> None:
    module = nn.Sequential(HandwrittenMoe(), HandwrittenMoe())
    compiled, capture = compile_rewritten(module)
    with torch.no_grad():
        compiled(torch.randn(TOKENS, HIDDEN))
    (gm,) = capture.modules
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        args = torch.fx.node.map_arg(node.args, lambda n: n.meta["example_value"])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: n.meta["example_value"])
        with torch.no_grad(), value.fake_mode:
            again = node.target(*args, **kwargs)
        assert (again.shape, again.dtype) == (value.shape, value.dtype), node.name
