"""A model without experts passes through: same nodes, no layers, no warning, right results."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from tests.models.running import assert_gradients_close, compile_on_npu, infer, train
from tests.models.zoo import build, token_ids


@pytest.mark.parametrize("shapes", ["static", pytest.param("dynamic", marks=pytest.mark.zoo)])
def test_dense_qwen3_infers_and_trains(
    shapes: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    ids = token_ids()
    eager = build("qwen3")
    logits, step = infer(eager, ids), train(eager.train(), ids)

    with caplog.at_level(logging.INFO, logger="moe_graph"):
        compiled, backend = compile_on_npu(
            build("qwen3"), dynamic=shapes == "dynamic", dump_dir=tmp_path
        )
        got, got_step = infer(compiled, ids.npu()), train(compiled.train(), ids.npu())

    torch.testing.assert_close(got, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_step.loss, step.loss, rtol=0, atol=1e-5)
    assert_gradients_close(got_step.gradients, step.gradients, limit=1e-4)
    assert backend.report.graphs == 2
    assert backend.report.layers == []
    assert not caplog.records
    for graph in range(2):
        before, after = (
            (tmp_path / f"fx_{graph}_{stage}.txt").read_text() for stage in ("before", "after")
        )
        assert before == after


def test_the_passes_leave_every_node_of_a_dense_model_alone() -> None:
    torch._dynamo.reset()
    seen = []

    def backend(gm: torch.fx.GraphModule, _: list[torch.Tensor]):
        nodes = list(gm.graph.nodes)
        text = str(gm.graph)
        assert rewrite_moe_layers(gm, Config()) == []
        seen.append(nodes == list(gm.graph.nodes) and text == str(gm.graph))
        return gm.forward

    infer(torch.compile(build("qwen3"), backend=backend, fullgraph=True), token_ids())
    assert seen == [True]
