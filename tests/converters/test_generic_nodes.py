"""What the GE nodes look like that the converters make."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchair
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

from moe_graph.converters import register_converters
from moe_graph.emulator.engine import session

EXPERTS, TOP_K, HIDDEN = 4, 2, 6
_ops = torch.ops.moe_graph


@pytest.fixture
def compile_and_read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Compile a function, run it once, return the GE nodes that reached the engine."""
    register_converters()
    torch._dynamo.reset()
    nodes: list[Any] = []
    add_graph = session.add_graph

    def recording(session_id: int, graph_id: int, model: bytes, options: dict[str, str]) -> None:
        definition = ModelDef()
        definition.ParseFromString(model)
        nodes.extend(definition.graph[0].op)
        add_graph(session_id, graph_id, model, options)

    monkeypatch.setattr(session, "add_graph", recording)

    def run(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool) -> list[Any]:
        compiled = torch.compile(
            function, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
        )
        compiled(*(tensor.npu() for tensor in inputs))
        return nodes

    return run


def _one(nodes: list[Any], op_type: str) -> Any:
    (node,) = [node for node in nodes if node.type == op_type]
    return node


def _own_attrs(node: Any) -> set[str]:
    return {name for name in node.attr if not name.startswith("_")}


def _route(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    expanded, row_idx, *_ = _ops.moe_init_routing_v2(x, ids, expert_num=EXPERTS)
    return expanded, row_idx


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, EXPERTS, (tokens, TOP_K), dtype=torch.int32)


def test_inputs_outputs_and_attributes(compile_and_read: Callable[..., list[Any]]) -> None:
    nodes = compile_and_read(_route, torch.randn(5, HIDDEN), _ids(5), dynamic=False)
    node = _one(nodes, "MoeInitRoutingV2")
    assert [desc.name for desc in node.input_desc] == ["x", "expert_idx"]
    assert [desc.name for desc in node.output_desc] == [
        "expanded_x",
        "expanded_row_idx",
        "expert_tokens_count_or_cumsum",
        "expert_tokens_before_capacity",
    ]
    assert _own_attrs(node) == {"expert_num"}
    assert node.attr["expert_num"].i == EXPERTS


def test_absent_inputs_are_marked(compile_and_read: Callable[..., list[Any]]) -> None:
    def combine(rows: torch.Tensor, row_idx: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ops.moe_finalize_routing_v2(
            rows, row_idx, None, None, None, scales, None, drop_pad_mode=2
        )
        return y

    row_idx = torch.arange(10, dtype=torch.int32)
    nodes = compile_and_read(
        combine, torch.randn(10, HIDDEN), row_idx, torch.randn(5, TOP_K), dynamic=False
    )
    node = _one(nodes, "MoeFinalizeRoutingV2")
    fed = {
        desc.name: bool(source) for desc, source in zip(node.input_desc, node.input, strict=True)
    }
    assert fed == {
        "expanded_x": True,
        "expanded_row_idx": True,
        "x1": False,
        "x2": False,
        "bias": False,
        "scales": True,
        "expert_idx": False,
    }
    assert _own_attrs(node) == {"drop_pad_mode"}


def test_a_dynamic_graph_carries_the_shape_rule(
    compile_and_read: Callable[..., list[Any]],
) -> None:
    nodes = compile_and_read(_route, torch.randn(5, HIDDEN), _ids(5), dynamic=True)
    node = _one(nodes, "MoeInitRoutingV2")
    rule = json.loads(node.attr["_inference_rule"].s)
    (tokens, hidden), (_, top_k) = rule["shape"]["inputs"]
    expanded, row_idx, counts, before = rule["shape"]["outputs"]
    assert expanded[0] in (f"{tokens} * {top_k}", f"{top_k} * {tokens}")
    assert expanded[1] == hidden
    assert row_idx == expanded[:1]
    assert counts == before == ["0"]


def test_empty_constants_are_shared(compile_and_read: Callable[..., list[Any]]) -> None:
    def twice(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        y = _ops.grouped_matmul_single(x, w, None, ends)
        z: torch.Tensor = _ops.grouped_matmul_single(y, w, None, ends)
        return z

    nodes = compile_and_read(
        twice,
        torch.randn(4, HIDDEN),
        torch.randn(EXPERTS, HIDDEN, HIDDEN),
        torch.tensor([1, 2, 3, 4]),
        dynamic=False,
    )
    grouped = [node for node in nodes if node.type == "GroupedMatmul"]
    assert len(grouped) == 2
    names = [desc.name for desc in grouped[0].input_desc]
    assert names[:3] == ["x0", "weight0", "bias0"]
    assert names[-2:] == ["group_list", "per_token_scale"]
    assert list(grouped[0].input[2:7]) == list(grouped[1].input[2:7])
    assert len([node for node in nodes if node.type == "Const"]) == len(set(grouped[0].input[2:7]))
    assert _own_attrs(grouped[0]) == {"split_item", "group_type"}
