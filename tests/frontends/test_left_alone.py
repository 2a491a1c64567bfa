"""A loop with a condition that fails stays as it is, and the report says which one and where."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

from moe_graph import preparation, prepare
from tests.frontends.graphs import Graphs
from tests.frontends.left_alone import HIDDEN, LEFT_ALONE, Layer

TOKENS = 10


@pytest.mark.parametrize("layer_class", LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_the_loop_is_left_alone_with_the_reason(layer_class: type[Layer]) -> None:
    layer = prepare(layer_class())
    assert type(layer) is layer_class
    (report,) = preparation(layer).layers
    assert report.status == "kept"
    (reason,) = report.reasons
    assert reason.check == layer_class.check
    file, _, line = reason.source.rpartition(":")
    assert layer_class.line in linecache.getline(file, int(line))
    assert reason.got
    assert reason.want


@pytest.mark.parametrize("layer_class", LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_it_compiles_to_what_it_does_eagerly(layer_class: type[Layer]) -> None:
    torch.manual_seed(0)
    layer, x = prepare(layer_class()).eval(), torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        torch.manual_seed(1)
        want = layer(x)
        torch.manual_seed(1)
        got = Graphs(refusing=True).compile(layer)(x)
    torch.testing.assert_close(got, want)


def test_a_method_set_on_the_module_is_left_alone() -> None:
    from tests.passes.styles.expert_loops import MakeMoe

    layer = MakeMoe()
    layer.forward = layer.forward  # as wrappers of modules do
    prepare(layer)
    (report,) = preparation(layer).layers
    assert report.reasons[0].check == "wrapped"


def test_loops_over_layers_are_not_reported() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                if i > 0:
                    x = layer(x)
            return x

    assert preparation(prepare(Stack())).layers == []
