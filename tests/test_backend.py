"""The backend: kept layers, the report across restarts, settings, and how it is named."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchair
from torch._dynamo.exc import BackendCompilerFailed
from torchair import npu_fx_compiler

import moe_graph
from tests.models.blocks import HIDDEN, kept_block, moe_block, tokens


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> None:
    torch._dynamo.reset()


def run(
    config: moe_graph.Config | None = None,
    dynamic: bool | None = None,
    build: Callable[[], torch.nn.Module] = moe_block,
    **options: Any,
) -> moe_graph.Report:
    """Compile and run a block, check the result, return the report."""
    block = build()
    want = block(tokens())
    backend = moe_graph.npu_backend(config, **options)
    got = torch.compile(block.npu(), backend=backend, fullgraph=True, dynamic=dynamic)(
        tokens().npu()
    )
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)
    return backend.report


@pytest.mark.parametrize(("on_miss", "lines"), [("warn", 1), ("ignore", 0)])
def test_a_kept_layer_runs_as_it_is(
    on_miss: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    report = run(moe_graph.Config(on_miss=on_miss), build=kept_block)
    (layer,) = report.kept
    assert layer.fx_nodes_before == layer.fx_nodes_after
    (reason,) = layer.reasons
    assert reason.check == "row-wise"
    records = [record for record in caplog.records if record.name == "moe_graph"]
    assert [record.levelno for record in records] == [logging.WARNING] * lines
    for record in records:
        assert layer.path in record.getMessage()
        assert str(reason) in record.getMessage()


def test_a_kept_layer_is_an_error_where_that_was_asked_for() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"(?s)MoE layer .*row-wise at mean") as info:
        run(moe_graph.Config(on_miss="error"), build=kept_block)
    error = info.value.inner_exception
    assert isinstance(error, moe_graph.KeptLayerError)
    assert error.layer.status == "kept"


def test_a_rewritten_layer_is_no_reason_to_speak(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="moe_graph"):
        report = run(moe_graph.Config(on_miss="error"))
    assert [layer.status for layer in report.layers] == ["rewritten"]
    assert not caplog.records


class ScaledBlock(torch.nn.Module):
    """A block with a float that dynamo makes an input of where shapes are dynamic."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.block = moe_block()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale)


def test_a_graph_that_dynamo_traces_twice_counts_once() -> None:
    module = ScaledBlock(0.5)
    want = module(tokens())
    backend = moe_graph.npu_backend()
    compiled = torch.compile(module.npu(), backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(tokens().npu()).cpu(), want, rtol=0, atol=1e-5)
    assert backend.report.graphs == 1
    assert [layer.status for layer in backend.report.layers] == ["rewritten"]


def test_a_float_that_changes_compiles_again() -> None:
    module = ScaledBlock(0.5)
    compiled = torch.compile(module, backend=moe_graph.npu_backend(), dynamic=True)
    module.npu()
    for scale in (0.5, 2.0, 0.5):
        module.scale = scale
        got = compiled(tokens().npu()).cpu()
        torch.testing.assert_close(got, moe_block()(tokens() * scale), rtol=0, atol=1e-5)


def test_the_settings_of_torchair_are_copied() -> None:
    config = torchair.CompilerConfig()
    before = config.as_dict()
    run(compiler_config=config)
    assert config.as_dict() == before


def test_a_mode_without_a_graph_engine_is_refused() -> None:
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with pytest.raises(
        BackendCompilerFailed, match=r"mode: got 'reduce-overhead', want 'max-autotune'"
    ):
        run(compiler_config=config)


@pytest.mark.parametrize("name", ["_process_send_recv", "_compile_graph_with_aot"])
def test_another_torchair_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(npu_fx_compiler, name)
    with pytest.raises(BackendCompilerFailed, match=rf"this TorchAir has no {name} .*torch_npu 2"):
        run()


def test_verify_runs_every_rewrite_against_what_it_replaced() -> None:
    report = run(moe_graph.Config(verify=True))
    assert len(report.rewritten) == 1


@pytest.mark.parametrize("soc", ["A2", "A3", "950"])
def test_every_product(soc: str) -> None:
    assert len(run(moe_graph.Config(soc=soc)).rewritten) == 1


def test_a_function_without_tensors_in_it() -> None:
    backend = moe_graph.npu_backend()
    compiled = torch.compile(lambda x: x, backend=backend)
    x = torch.ones(3).npu()
    assert compiled(x) is x


def test_an_empty_batch() -> None:
    backend = moe_graph.npu_backend()
    compiled = torch.compile(moe_block().npu(), backend=backend, fullgraph=True)
    assert compiled(torch.zeros(0, 5, HIDDEN).npu()).shape == (0, 5, HIDDEN)


def test_the_backend_has_a_name() -> None:
    script = (
        "import moe_graph, torch\n"
        "from moe_graph.backend import moe_graph_backend\n"
        "f = torch.compile(lambda x: (x + 1).sum(), backend='moe_graph')\n"
        "print(f(torch.ones(3).npu()).item(), [moe_graph_backend.report.graphs])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "6.0 [1]\n", done.stderr
