"""The files of ``Config(dump_dir=...)``: which there are, and that they can be read."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from google.protobuf import text_format
from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

import moe_graph
from moe_graph.provenance import GE_ATTRIBUTE
from tests.models.blocks import moe_block, tokens

FUSED = ("MoeInitRoutingV2", "GroupedMatmul", "SwiGlu", "MoeFinalizeRoutingV2")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, moe_graph.Report]:
    """A training step of a block (graph 0), then a function without a layer (graph 1)."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("dumps") / "made" / "on demand"
    backend = moe_graph.npu_backend(moe_graph.Config(dump_dir=folder))
    block = torch.compile(moe_block().npu(), backend=backend)
    block(tokens().npu()).sum().backward()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2).npu())
    return folder, backend.report


def read(path: Path) -> GraphDef:
    return text_format.Parse(path.read_text(), GraphDef())


def test_there_is_one_file_per_graph_and_stage(dumped) -> None:
    folder, _ = dumped
    graphs = ("0_0", "0_1", "1_0")
    assert {path.name for path in folder.iterdir()} == {
        "report.json",
        *(f"fx_{number}_{stage}.txt" for number in (0, 1) for stage in ("before", "after")),
        *(f"aten_{graph}.txt" for graph in graphs),
        *(f"ge_{graph}.{kind}" for graph in graphs for kind in ("txt", "pbtxt", "py")),
    }


def test_fx_dumps_show_the_rewrite(dumped) -> None:
    folder, _ = dumped
    before, after = ((folder / f"fx_0_{name}.txt").read_text() for name in ("before", "after"))
    assert "histc" in before
    assert "moe_init_routing_v2" not in before
    assert "histc" not in after
    assert "moe_init_routing_v2" in after
    assert (folder / "fx_1_before.txt").read_text() == (folder / "fx_1_after.txt").read_text()


def test_aten_dumps_show_forward_and_backward(dumped) -> None:
    folder, _ = dumped
    forward, backward = ((folder / f"aten_0_{part}.txt").read_text() for part in (0, 1))
    assert "moe_finalize_routing_v2.default" in forward
    assert "moe_finalize_routing_v2_grad.default" in backward


def test_the_ge_text_is_a_graph_with_origins(dumped) -> None:
    folder, report = dumped
    graph = read(folder / "ge_0_0.txt")
    fused = [op for op in graph.op if op.type in FUSED]
    assert {op.type for op in fused} == set(FUSED)
    (layer,) = report.layers
    for op in fused:
        origin = op.attr[GE_ATTRIBUTE].s.decode()
        assert origin.endswith(f"[moe {layer.path}]"), op.type
        assert "transformers/integrations/moe.py:" in origin, op.type


@pytest.mark.parametrize("graph", ["0_0", "0_1", "1_0"])
def test_the_python_dump_parses_and_holds_every_node(dumped, graph: str) -> None:
    folder, _ = dumped
    code = (folder / f"ge_{graph}.py").read_text()
    ast.parse(code)
    nodes = read(folder / f"ge_{graph}.txt").op
    for op in nodes:
        if op.type not in ("Const", "NetOutput"):
            assert re.search(rf"^[#\[\w, ]*\b{op.name}_0\b.* = ge\.", code, re.MULTILINE), op.name
    calls = re.findall(r"^# \[.*\] = ge\.custom_op\('(\w+)'", code, re.MULTILINE)
    custom = [op.type for op in nodes if op.type.startswith(("Moe", "GroupedMatmul", "SwiGlu"))]
    assert [call for call in calls if call != "Const"] == custom


def test_a_custom_node_of_the_python_dump_has_inputs_and_attributes(dumped) -> None:
    folder, _ = dumped
    code = (folder / "ge_0_0.py").read_text()
    (line,) = [line for line in code.splitlines() if "ge.custom_op('MoeInitRoutingV2'" in line]
    assert line.startswith("# [MoeInitRoutingV2_0, MoeInitRoutingV2_1, MoeInitRoutingV2_2,")
    assert "'x': 'Reshape_0', 'expert_idx': 'MoeGatingTopK_1'" in line
    assert "'expert_num': 4" in line
    # The empty optional inputs of a grouped product are constants that only custom nodes use.
    assert re.search(r"# \[(Const_\w+)\] = ge.custom_op\('Const'.*'DT_\w+\[0\]'", code)


def test_the_json_file_is_the_report(dumped) -> None:
    folder, report = dumped
    assert json.loads((folder / "report.json").read_text()) == report.to_dict()


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    torch.compile(moe_block().npu(), backend=moe_graph.npu_backend())(tokens().npu())
    assert list(tmp_path.iterdir()) == []
