"""Data-dependent shapes are captured where that makes one graph, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from moe_graph import Config, KeptLayerError, npu_backend
from tests.frontends.graphs import Graphs, number_of_graphs
from tests.passes.styles import STYLES
from tests.passes.styles.parts import Style

TOKENS = 12


def _styles(needs: str) -> list[pytest.ParameterSet]:
    return [pytest.param(style, id=style.name) for style in STYLES if style.needs == needs]


@pytest.mark.parametrize("style", _styles("flags"))
def test_plain_loops_make_one_graph(style: Style) -> None:
    layer, x, graphs = style.build(), style.tokens(TOKENS), Graphs()
    torch.testing.assert_close(graphs.compile(layer)(x), layer(x), rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("style", _styles("flags") + _styles("prepare"))
def test_what_is_left_over_is_compiled_as_torch_compile_does(style: Style) -> None:
    layer, x, graphs = style.build(), style.tokens(TOKENS), Graphs(refusing=True)
    expected = number_of_graphs(layer, x)
    torch.testing.assert_close(graphs.compile(layer)(x), layer(x), rtol=0, atol=0)
    assert 1 <= len(graphs) <= expected


def _items(x: Tensor) -> Tensor:
    return x * int(x.sum().item()) + 1


def _listed_counts(x: Tensor) -> Tensor:
    ids = x.argmax(-1)
    return torch.stack([x[ids == e].sum() for e, n in enumerate(_counts(ids)) if n])


def _counts(ids: Tensor) -> list[int]:
    return torch.bincount(ids, minlength=3).tolist()


def _hits(x: Tensor) -> Tensor:
    for row in (x > 0).any(-1).nonzero(as_tuple=True)[0].tolist():
        x = x + row
    return x


@pytest.mark.parametrize("program", [_items, _listed_counts, _hits])
@pytest.mark.parametrize("refusing", [False, True])
def test_programs_compile_that_capture_alone_would_break(
    program: Callable[[Tensor], Tensor], refusing: bool
) -> None:
    x, graphs = torch.randn(5, 3).round(), Graphs(refusing=refusing)
    torch.testing.assert_close(graphs.compile(program)(x), program(x))


def test_capture_alone_does_break_them() -> None:
    x = torch.randn(5, 3)
    with (
        torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
        ),
        pytest.raises(Exception, match="data-dependent"),
    ):
        torch.compile(_listed_counts, backend="eager")(x)


def test_other_backends_do_not_capture() -> None:
    style = next(style for style in STYLES if style.name == "MistralReference")
    layer, x = style.build(), style.tokens(TOKENS)
    before = number_of_graphs(layer, x)
    Graphs()
    assert number_of_graphs(layer, x) == before > 1


def test_flags_are_what_they_were_after_a_compilation() -> None:
    Graphs().compile(_items)(torch.ones(3))
    assert not torch._dynamo.config.capture_scalar_outputs
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops


class _OddExpert(nn.Module):
    """A loop over experts one of which is of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.up = nn.ModuleList(nn.Linear(8, width) for width in (4, 4, 6))
        self.down = nn.ModuleList(nn.Linear(width, 8) for width in (4, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(ids == e)
            y = self.down[e](self.up[e](x[token]).relu()) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


def test_a_kept_layer_is_in_the_report_once_it_is_compiled_in_fragments() -> None:
    layer, x = _OddExpert().to("npu"), torch.randn(4, 8).to("npu")
    backend = npu_backend(Config(on_miss="ignore"))
    with torch.no_grad():
        result = torch.compile(layer, backend=backend)(x)
        torch.testing.assert_close(result, layer(x))
    assert [report.status for report in backend.report.layers] == ["kept"]


def test_on_miss_error_is_raised_from_the_graph_that_has_the_whole_layer() -> None:
    layer, x = _OddExpert().to("npu"), torch.randn(4, 8).to("npu")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(layer, backend=npu_backend(Config(on_miss="error")))(x)
    assert isinstance(raised.value.inner_exception, KeptLayerError)
