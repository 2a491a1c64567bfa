"""Where nodes come from: readable module paths, source lines, and errors that name them."""

from __future__ import annotations

import re

import pytest
import torch
from torch.fx.traceback import annotate as annotated

import moe_graph
from moe_graph import provenance
from moe_graph.provenance import LAYER_KEY, describe, layer_in

IDS_OUT_OF_RANGE = 9


def node_with(**meta: object) -> torch.fx.Node:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta.update(meta)
    return node


@pytest.mark.parametrize(
    ("dynamo", "readable"),
    [
        ("L['self'].model.layers[0].mlp", "model.layers.0.mlp"),
        ("L['self']._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("L['self']._orig_mod.model", "model"),
        ("L['self']", ""),
        ("L['block'].experts", "block.experts"),
    ],
)
def test_paths_read_like_those_of_named_modules(dynamo: str, readable: str) -> None:
    stack = {"a": ("L['self']", torch.nn.Module), "b": (dynamo, torch.nn.Module)}
    assert provenance.module_path(node_with(nn_module_stack=stack)) == readable


def test_the_source_is_the_innermost_frame_without_the_folder_of_packages() -> None:
    trace = (
        '  File "/home/me/train.py", line 3, in step\n    model(x)\n'
        '  File "/venv/lib/python3.11/site-packages/transformers/mlp.py", line 41, in forward\n'
        "    return x\n"
    )
    assert provenance.source_line(node_with(stack_trace=trace)) == "transformers/mlp.py:41"
    own, _, _ = trace.partition('  File "/venv')
    assert provenance.source_line(node_with(stack_trace=own)) == "/home/me/train.py:3"


def test_a_description_holds_what_is_known() -> None:
    stack = {"a": ("L['self'].mlp", torch.nn.Module)}
    trace = '  File "/home/me/mlp.py", line 7, in forward\n'
    place = "mlp at /home/me/mlp.py:7"
    assert describe(node_with()) == ""
    assert describe(node_with(nn_module_stack=stack)) == "mlp"
    assert describe(node_with(nn_module_stack=stack, stack_trace=trace)) == place
    in_layer = describe(
        node_with(nn_module_stack=stack, stack_trace=trace, custom={LAYER_KEY: "mlp.experts"})
    )
    assert in_layer == f"{place} [moe mlp.experts]"
    assert layer_in(in_layer) == "mlp.experts"
    assert layer_in(place) == layer_in("") == ""


class Dispatch(torch.nn.Module):
    """Part of a layer, as the passes write it, with ids that come from outside."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with annotated({LAYER_KEY: "mlp.experts"}):
            return torch.ops.moe_graph.moe_init_routing_v2(x * 2, ids, expert_num=4)[0]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Dispatch()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.mlp(x, ids) + 1


def test_an_error_while_running_names_op_node_layer_line_got_and_want() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Model(), backend=moe_graph.npu_backend())
    x, ids = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int32)
    torch.testing.assert_close(compiled(x.npu(), ids.npu()).cpu(), Model()(x, ids))
    with pytest.raises(RuntimeError) as info:
        compiled(x.npu(), ids.fill_(IDS_OUT_OF_RANGE).npu())
    line = Dispatch.forward.__code__.co_firstlineno + 2
    place = rf"in mlp at \S*tests/test_provenance\.py:{line} \[moe mlp\.experts\]"
    assert re.search(
        rf"GE op MoeInitRoutingV2 \(node MoeInitRoutingV2, from FX node moe_init_routing_v2 "
        rf"\(moe_graph\.moe_init_routing_v2\.default\) {place}\): "
        r"expert_idx: got ids from 9 to 9, want ids in \[0, 4\)",
        str(info.value),
    )


def test_a_graph_runs_again_after_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Model(), backend=moe_graph.npu_backend())
    x, ids = torch.randn(3, 8), torch.tensor([[0, 1], [1, 3], [2, 0]], dtype=torch.int32)
    with pytest.raises(RuntimeError):
        compiled(x.npu(), torch.full_like(ids, IDS_OUT_OF_RANGE).npu())
    torch.testing.assert_close(compiled(x.npu(), ids.npu()).cpu(), Model()(x, ids))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 2), torch.int64, "expert_idx"),
        ((3,), torch.int32, "expert_idx"),
        ((4, 2), torch.int32, "expert_idx"),
    ],
)
def test_a_wrong_input_is_refused_while_tracing(
    shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Model(), backend=moe_graph.npu_backend())
    with pytest.raises(Exception, match=message) as info:
        compiled(torch.randn(3, 8).npu(), torch.zeros(shape, dtype=dtype).npu())
    text = str(info.value)
    assert "got" in text
    assert "want" in text
    assert "test_provenance.py" in text
