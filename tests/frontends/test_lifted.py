"""Loops in many spellings are lifted, and then have the values they had."""

from __future__ import annotations

import pytest
import torch

from moe_graph import preparation, prepare
from tests.frontends.graphs import Graphs
from tests.frontends.lifted import HIDDEN, LIFTED, Layer

_CLASSES = pytest.mark.parametrize("layer_class", LIFTED, ids=lambda cls: cls.__name__)


@_CLASSES
def test_the_loop_is_lifted(layer_class: type[Layer]) -> None:
    layer = prepare(layer_class())
    assert [(r.status, r.reasons) for r in preparation(layer).layers] == [("rewritten", [])]


@_CLASSES
@pytest.mark.parametrize("tokens", [1, 10])
def test_values_are_bit_for_bit_those_of_the_loop(layer_class: type[Layer], tokens: int) -> None:
    layer, x, graphs = layer_class(), torch.randn(tokens, HIDDEN), Graphs()
    want = layer(x)
    prepare(layer)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=0)
    torch.testing.assert_close(graphs.compile(layer)(x), want, rtol=0, atol=0)
    assert len(graphs) == 1


@_CLASSES
def test_one_graph_serves_all_token_counts(layer_class: type[Layer]) -> None:
    layer, graphs = prepare(layer_class()), Graphs()
    compiled = graphs.compile(layer, dynamic=True)
    for tokens in (7, 3, 12):
        x = torch.randn(tokens, HIDDEN)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
    assert len(graphs) == 1


@_CLASSES
def test_gradients_are_those_of_the_loop(layer_class: type[Layer]) -> None:
    layer, x = prepare(layer_class()), torch.randn(10, HIDDEN)
    layer(x).square().sum().backward()
    want = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    Graphs().compile(layer)(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if want[name] is not None:
            torch.testing.assert_close(parameter.grad, want[name])
        elif parameter.grad is not None:
            assert not parameter.grad.any()
