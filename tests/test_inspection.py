"""Looking at a model without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_graph
from moe_graph.emulator.engine import session
from moe_graph.inspection import Doctor, every_compile_uses
from tests.models.blocks import kept_block, moe_block, tokens


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> None:
    torch._dynamo.reset()


@pytest.fixture
def _no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a graph ran on the device")

    monkeypatch.setattr(session, "run", refuse)


@pytest.mark.usefixtures("_no_runs")
def test_explain_reports_down_to_the_ge_nodes_and_runs_nothing() -> None:
    report = moe_graph.explain(moe_block().npu(), tokens().npu())
    (layer,) = report.layers
    assert layer.status == "rewritten"
    assert layer.ge_nodes["MoeInitRoutingV2"] == 1
    assert layer.ge_nodes["GroupedMatmul"] == 2


@pytest.mark.usefixtures("_no_runs")
def test_a_patched_engine_would_have_been_noticed() -> None:
    compiled = torch.compile(moe_block().npu(), backend=moe_graph.npu_backend())
    with pytest.raises(RuntimeError, match="a graph ran on the device"):
        compiled(tokens().npu())


def test_explain_reports_kept_layers_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    report = moe_graph.explain(kept_block().npu(), tokens().npu())
    assert [layer.status for layer in report.layers] == ["kept"]
    assert not [record for record in caplog.records if record.name == "moe_graph"]


def test_explain_takes_keyword_arguments_functions_and_settings() -> None:
    block = kept_block().npu()

    def function(x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return block(x) * factor

    config = moe_graph.Config(on_miss="error")
    report = moe_graph.explain(function, tokens().npu(), factor=2.0, config=config)
    assert len(report.kept) == 1


@pytest.mark.usefixtures("_no_runs")
def test_explain_follows_a_model_through_its_breaks() -> None:
    first, second = moe_block().npu(), moe_block().npu()

    def function(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    report = moe_graph.explain(function, tokens().npu())
    assert report.graphs == 2
    assert [layer.status for layer in report.layers] == ["rewritten"] * 2


def test_explain_leaves_the_model_alone() -> None:
    block = moe_block()
    want = block(tokens())
    moe_graph.explain(block.npu(), tokens().npu())
    torch.testing.assert_close(block(tokens().npu()).cpu(), want, rtol=0, atol=1e-5)
    compiled = torch.compile(block, backend=moe_graph.npu_backend())
    torch.testing.assert_close(compiled(tokens().npu()).cpu(), want, rtol=0, atol=1e-5)
    assert all(parameter.grad is None for parameter in block.parameters())


class Counting(torch.nn.Module):
    """Two ops without a lowering, one of them twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return torch.histc(y, bins=4), torch.kthvalue(y, 2, dim=0)[0], torch.histc(x, bins=4)


@pytest.mark.usefixtures("_no_runs")
def test_doctor_lists_ops_without_a_lowering_and_runs_eagerly() -> None:
    doctor = Doctor()
    x = torch.randn(5, 3)
    got = torch.compile(Counting(), backend=doctor)(x.npu())
    for one, other in zip(got, Counting()(x), strict=True):
        torch.testing.assert_close(one.cpu(), other)
    assert [(entry.op, entry.count) for entry in doctor.missing] == [
        ("aten.histc.default", 2),
        ("aten.kthvalue.default", 1),
    ]
    line = Counting.forward.__code__.co_firstlineno + 2
    assert all(entry.where.endswith(f"test_inspection.py:{line}") for entry in doctor.missing)


def test_doctor_finds_nothing_in_a_layer_that_is_rewritten() -> None:
    doctor = Doctor()
    block, x = moe_block(), tokens().requires_grad_()
    want = torch.autograd.grad(block(x).square().sum(), x)[0]
    x_npu = tokens().npu().requires_grad_()
    compiled = torch.compile(block.npu(), backend=doctor)
    got = torch.autograd.grad(compiled(x_npu).square().sum(), x_npu)[0]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert doctor.missing == []
    assert doctor.report.graphs == 1


def test_doctor_looks_at_backward_graphs_too() -> None:
    doctor = Doctor()
    x = torch.randn(2, 3, 8, 8).npu().requires_grad_()
    torch.compile(lambda x: torch.nn.functional.unfold(x, 3), backend=doctor)(x).sum().backward()
    assert "aten.im2col.default" in {entry.op for entry in doctor.missing}
    assert "aten.col2im.default" in {entry.op for entry in doctor.missing}


class Relu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def compile_in_every_way(function: Any) -> list[Any]:
    module = Relu()
    module.compile(backend="inductor")
    return [
        torch.compile(function),
        torch.compile(function, backend="eager", dynamic=True),
        torch.compile(function, mode="max-autotune"),
        torch.compile(function, options={"trace.enabled": True}),
        torch.compile(backend="inductor")(function),
        torch.compile(function, fullgraph=True),
        module,
    ]


def test_every_compile_of_a_script_uses_the_given_backend() -> None:
    original = torch.compile
    backend = moe_graph.npu_backend()
    with every_compile_uses(backend):
        functions = compile_in_every_way(torch.relu)
    assert torch.compile is original
    x = torch.tensor([-1.0, 2.0])
    for count, function in enumerate(functions, 1):
        torch._dynamo.reset()
        assert torch.equal(function(x.npu()).cpu(), x.relu())
        assert backend.report.graphs == count


def test_torch_compile_comes_back_after_an_error() -> None:
    original = torch.compile
    with pytest.raises(ZeroDivisionError), every_compile_uses(moe_graph.npu_backend()):
        raise ZeroDivisionError
    assert torch.compile is original
