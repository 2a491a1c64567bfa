"""What a rewritten layer is in the GE graph: fused routing, grouped products, nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from google.protobuf import text_format
from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

from moe_graph.backend import MoeGraphBackend
from moe_graph.provenance import GE_ATTRIBUTE
from tests.models.running import compile_on_npu, infer, train
from tests.models.zoo import MOE_LAYERS, build, token_ids

ROUTING = {
    "Bincount",
    "Histogram",
    "IndexByTensor",
    "IndexPutV2",
    "InplaceIndexAdd",
    "InplaceIndexAddWithSorted",
    "MaskedFill",
    "NonZero",
    "OneHot",
    "ScatterElements",
    "ScatterElementsV2",
    "ScatterNdAdd",
    "ScatterUpdate",
    "SearchSorted",
    "Sort",
}
# A layer may hold more: casts, reshapes, and what is beside the experts in deepseek_v3.
FORWARD = {
    "MoeGatingTopK": 1,
    "MoeInitRoutingV2": 1,
    "GroupedMatmul": 2,
    "SwiGlu": 1,
    "MoeFinalizeRoutingV2": 1,
}
BACKWARD = {
    "MoeInitRoutingV2Grad": 1,
    "GroupedMatmul": 4,
    "SwiGluGrad": 1,
    "MoeFinalizeRoutingV2Grad": 1,
}
# The gradient of the weights goes to the scores of the chosen experts.
OF_ROUTER_GRADIENT = {"ScatterElements": 1}


def read(path: Path) -> GraphDef:
    return text_format.Parse(path.read_text(), GraphDef())


def fused(types: Counter[str]) -> dict[str, int]:
    return {
        name: count
        for name, count in types.items()
        if name.startswith(("Moe", "GroupedMatmul", "SwiGlu"))
    }


def routing(types: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in types.items() if name in ROUTING}


def of_layer(graph: GraphDef, path: str) -> Counter[str]:
    ending = f"[moe {path}]".encode()
    return Counter(op.type for op in graph.op if op.attr[GE_ATTRIBUTE].s.endswith(ending))


@pytest.fixture(params=MOE_LAYERS, scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, MoeGraphBackend, Path]:
    """One inference graph (0), then the two graphs of a training step (1)."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp(request.param)
    model, backend = compile_on_npu(build(request.param), dump_dir=folder)
    infer(model, token_ids().npu())
    train(model.train(), token_ids().npu())
    return request.param, backend, folder


def test_the_report_counts_the_nodes_of_each_layer(compiled) -> None:
    name, backend, _ = compiled
    layers = backend.report.layers
    assert len(layers) == 2 * MOE_LAYERS[name]
    for layer in layers:
        trains = layer.graph == 1
        wanted = Counter(FORWARD) + Counter(BACKWARD if trains else {})
        assert fused(Counter(layer.ge_nodes)) == dict(wanted)
        assert routing(Counter(layer.ge_nodes)) == (OF_ROUTER_GRADIENT if trains else {})
        assert layer.router_op == "MoeGatingTopK"
        assert layer.path.startswith("model.layers.")
        assert layer.source.startswith("transformers/")
        assert layer.fx_nodes_after < layer.fx_nodes_before


@pytest.mark.parametrize(
    ("dump", "wanted"), [("0_0", FORWARD), ("1_0", FORWARD), ("1_1", BACKWARD)]
)
def test_the_graph_holds_no_routing_beside_the_fused_ops(compiled, dump: str, wanted) -> None:
    name, backend, folder = compiled
    graph = read(folder / f"ge_{dump}.txt")
    types = Counter(op.type for op in graph.op)
    assert fused(types) == {op: count * MOE_LAYERS[name] for op, count in wanted.items()}
    for layer in backend.report.layers:
        nodes = of_layer(graph, layer.path)
        assert fused(nodes) == wanted
        assert routing(nodes) == (OF_ROUTER_GRADIENT if wanted is BACKWARD else {})


def test_nothing_of_the_experts_code_sorts_or_scatters(compiled) -> None:
    """Attention masks may; they come from other files of transformers."""
    _, _, folder = compiled
    origins = [
        op.attr[GE_ATTRIBUTE].s.decode()
        for dump in folder.glob("ge_*.txt")
        for op in read(dump).op
        if op.type in ROUTING
    ]
    assert not [origin for origin in origins if "integrations/moe.py" in origin]
