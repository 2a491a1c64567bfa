"""``prepare`` changes what dynamo traces for moe_graph, and nothing else."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from torch import Tensor, nn

import moe_graph
from moe_graph import preparation, prepare, unprepare
from tests.frontends.graphs import Graphs, number_of_graphs
from tests.passes.styles import STYLES
from tests.passes.styles.parts import Style

TOKENS = 12

_PREPARED = [pytest.param(style, id=style.name) for style in STYLES if style.needs == "prepare"]


@pytest.mark.parametrize("style", _PREPARED)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_prepared_layer_makes_one_graph_of_equal_values(style: Style, tokens: int) -> None:
    layer, x, graphs = style.build(), style.tokens(tokens), Graphs()
    want = layer(x)
    assert prepare(layer) is layer
    torch.testing.assert_close(layer(x), want, rtol=0, atol=0)
    torch.testing.assert_close(graphs.compile(layer)(x), want, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_eager_results_and_gradients_are_as_before(style: Style) -> None:
    layer, x = style.build(), style.tokens(TOKENS)
    before = _result_and_gradients(layer, x)
    prepare(layer)
    torch.testing.assert_close(_result_and_gradients(layer, x), before, rtol=0, atol=0)


def _result_and_gradients(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    layer.zero_grad(set_to_none=True)
    result = layer(x)
    result.square().sum().backward()
    return [result.detach(), *(parameter.grad for parameter in layer.parameters())]


@pytest.fixture
def official() -> Style:
    """A layer with a loop that is lifted."""
    return next(style for style in STYLES if style.name == "DeepseekV3Official")


def test_gradients_of_idle_experts_are_zeros(official: Style) -> None:
    layer, x = official.build(), official.tokens(TOKENS)
    want = _result_and_gradients(layer, x)
    prepare(layer)
    layer.zero_grad(set_to_none=True)
    Graphs().compile(layer)(x).square().sum().backward()
    got = [parameter.grad for parameter in layer.parameters()]
    assert any(gradient is None for gradient in want[1:])
    for gradient, eager in zip(got, want[1:], strict=True):
        zeros = torch.zeros_like(gradient) if eager is None else eager
        torch.testing.assert_close(gradient, zeros)


def test_other_backends_get_the_loop_as_it_is_written(official: Style) -> None:
    layer, x = official.build(), official.tokens(TOKENS)
    before = number_of_graphs(layer, x)
    prepare(layer)
    assert number_of_graphs(layer, x) == before > 1


def test_other_models_of_the_class_are_not_changed(official: Style) -> None:
    prepared, other, x = official.build(), official.build(), official.tokens(TOKENS)
    prepare(prepared)
    graphs = Graphs()
    graphs.compile(other)(x)
    assert len(graphs) > 1
    assert type(other) is official.module
    assert type(prepared) is not official.module
    assert isinstance(prepared, official.module)
    assert type(prepared).__qualname__ == official.module.__qualname__


def test_layers_of_one_class_share_their_code(official: Style) -> None:
    one, two = prepare(official.build()), prepare(official.build())
    assert type(one) is type(two)


def test_it_can_be_undone_and_done_again(official: Style) -> None:
    layer = official.build()
    prepare(prepare(layer))
    assert [report.status for report in preparation(layer).layers] == ["rewritten"]
    unprepare(layer)
    assert type(layer) is official.module
    assert preparation(layer).layers == []


def test_a_copy_is_prepared_too(official: Style) -> None:
    layer, x, graphs = prepare(official.build()), official.tokens(TOKENS), Graphs()
    again = copy.deepcopy(layer)
    assert type(again) is type(layer)
    assert again.router.weight is not layer.router.weight
    torch.testing.assert_close(graphs.compile(again)(x), layer(x), rtol=0, atol=0)
    assert len(graphs) == 1


def test_what_is_saved_is_of_the_class_itself(official: Style) -> None:
    layer, x = prepare(official.build()), official.tokens(TOKENS)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert type(again) is official.module
    torch.testing.assert_close(again(x), layer(x), rtol=0, atol=0)


def test_state_dict_keeps_its_names(official: Style) -> None:
    layer = official.build()
    before = list(layer.state_dict())
    assert list(prepare(layer).state_dict()) == before


def test_the_report_names_path_and_line(official: Style, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Identity(), official.build())
    with caplog.at_level(logging.INFO, logger="moe_graph"):
        prepare(model)
    (report,) = preparation(model).layers
    assert (report.path, report.status, report.form) == ("1", "rewritten", "expert-loop")
    assert "expert_loops.py:" in report.source
    assert "expert loop of 1 lifted" in caplog.text
    assert "expert-loop" in preparation(model).to_json()


def test_tracebacks_of_a_lifted_loop_name_the_file_of_the_layer(official: Style) -> None:
    layer, x, graphs = prepare(official.build()), official.tokens(TOKENS), Graphs()
    graphs.compile(layer)(x)
    (graph,) = graphs
    where = [node for node in graph.graph.nodes if node.target is torch.where]
    assert where
    assert all("expert_loops.py" in node.meta["stack_trace"] for node in where)


def test_a_model_without_loops_has_nothing_to_report() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert preparation(model).layers == []


def test_it_is_a_public_name() -> None:
    assert {"prepare", "preparation", "unprepare"} <= set(moe_graph.__all__)
