"""``Config(verify=True)`` runs each rewritten layer against what it replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_graph.config import Config
from moe_graph.passes import fused, rewrite_moe_layers, verify
from moe_graph.report import LayerReport
from tests.passes import test_gathered_weights, test_loops, test_splits
from tests.passes.families import FAMILIES
from tests.passes.families import HIDDEN as FAMILY_HIDDEN
from tests.passes.handwritten import EXPERTS, HIDDEN, TOKENS, HandwrittenMoe
from tests.passes.test_gathered_weights import GatheredMoe
from tests.passes.test_layers import Stack
from tests.passes.test_loops import LoopMoe

MODULES = [
    HandwrittenMoe(),
    GatheredMoe(test_gathered_weights._einsum),
    LoopMoe(test_loops._modules),
    LoopMoe(test_splits._two_blocks),
    LoopMoe(test_loops._any),
]


def compile_verified(module: nn.Module, dynamic: bool = False) -> Any:
    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        layers = rewrite_moe_layers(gm, Config(verify=True))
        assert {layer.status for layer in layers} == {"rewritten"}
        return gm.forward

    return torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_right_rewrites_pass(model: str, dtype: torch.dtype, dynamic: bool) -> None:
    block = next(f for f in FAMILIES if f.model == model).build(dtype).eval()
    compile_verified(block, dynamic)(torch.randn(2, 9, FAMILY_HIDDEN, dtype=dtype))


@pytest.mark.parametrize("module", MODULES, ids=["sorted", "gathered", "loop", "split", "mask"])
def test_wrong_rewrite_is_taken_back(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_ROW_ORDER_NO_DROP", 0)  # the column order of the rows
    before: list[str] = []
    after: list[str] = []
    reports: list[LayerReport] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        before.extend(str(node.format_node()) for node in gm.graph.nodes)
        reports.extend(rewrite_moe_layers(gm, Config(verify=True)))
        after.extend(str(node.format_node()) for node in gm.graph.nodes)
        assert not any("custom" in node.meta and node.meta["custom"] for node in gm.graph.nodes)
        return gm.forward

    x = torch.randn(TOKENS, HIDDEN)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    (report,) = reports
    assert report.status == "kept"
    assert report.reasons[0].check == "verify"
    assert after == before


@pytest.mark.parametrize("module", MODULES, ids=["sorted", "gathered", "loop", "split", "mask"])
def test_every_form_passes(module: nn.Module) -> None:
    compile_verified(module)(torch.randn(TOKENS, HIDDEN))


class GatesReturned(LoopMoe):
    """A loop that reads gates which somebody else reads, too."""

    def forward(self, x: torch.Tensor) -> Any:
        r = self.route(x)
        gates = torch.zeros(x.shape[0], EXPERTS).scatter(1, r.ids, r.weights)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(r.ids == expert)
            out.index_add_(0, token, self.stacked(x[token], expert) * gates[token, expert, None])
        return out, gates


def test_inputs_that_follow_from_others_are_computed() -> None:
    compile_verified(GatesReturned(test_loops._where))(torch.randn(TOKENS, HIDDEN))


def test_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = verify._random_inputs

    def counting(*args: Any) -> Any:
        runs.append(1)
        return original(*args)

    monkeypatch.setattr(verify, "_random_inputs", counting)
    module = Stack(*(HandwrittenMoe() for _ in range(4)))
    compile_verified(module)(torch.randn(TOKENS, HIDDEN))
    assert len(runs) == 3, "one layer, three choices of experts"
