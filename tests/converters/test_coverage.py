"""The list of ops without a lowering: complete, with places, before any conversion is tried."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torchair
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

import moe_graph
from moe_graph.converters import register_converters
from moe_graph.converters.coverage import LoweringError, missing_lowerings, why_not_lowered
from moe_graph.ops import all_opdefs
from moe_graph.ops.torch_binding import torch_name

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _converters() -> None:
    register_converters()
    torch._dynamo.reset()


def unlowered(x: torch.Tensor) -> Any:
    y = x.exp()
    return torch.histc(y, bins=4), torch.kthvalue(y, 2, dim=0)[0], torch.histc(x, bins=4)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (aten.add.Tensor, None),
        (aten.mm.default, None),
        (aten.histc.default, "no converter"),
        (aten.bincount.default, "no converter"),
        (aten.silu_backward.default, "converter refuses every call"),
        (aten.index_put.default, "converter refuses every call"),
        (torch.ops.npu.npu_fusion_attention_v3.default, None),
        (operator.getitem, None),
        (torch.relu, None),
    ],
)
def test_why_an_op_has_no_lowering(target: Any, why: str | None) -> None:
    assert why_not_lowered(target) == why


def test_every_op_of_moe_graph_has_a_lowering() -> None:
    for opdef in all_opdefs():
        overload = getattr(torch.ops.moe_graph, torch_name(opdef.ge_type)).default
        assert why_not_lowered(overload) is None, opdef.ge_type
    assert why_not_lowered(torch.ops.moe_graph.grouped_matmul_single.default) is None


def test_a_converter_that_is_called_refused_does_raise() -> None:
    """What the source of a converter shows is what it does."""
    compiled = torch.compile(
        lambda x, i, v: torch.ops.aten.index_put(x, [i], v), backend=torchair.get_npu_backend()
    )
    with pytest.raises(Exception, match=r"index_put.* is not implemented"):
        compiled(torch.zeros(3).npu(), torch.tensor([1]).npu(), torch.ones(1).npu())


def test_the_most_frequent_op_comes_first() -> None:
    graph = make_fx(unlowered)(torch.randn(5))
    assert [(entry.op, entry.count, entry.why) for entry in missing_lowerings(graph)] == [
        ("aten.histc.default", 2, "no converter"),
        ("aten.kthvalue.default", 1, "no converter"),
    ]


def test_a_graph_that_can_be_lowered_misses_nothing() -> None:
    assert missing_lowerings(make_fx(lambda x: (x @ x).relu().sum(-1))(torch.randn(3, 3))) == []


def test_the_error_names_every_op_with_its_line() -> None:
    compiled = torch.compile(unlowered, backend=moe_graph.npu_backend())
    with pytest.raises(BackendCompilerFailed) as info:
        compiled(torch.randn(5).npu())
    error = info.value.inner_exception
    assert isinstance(error, LoweringError)
    line = unlowered.__code__.co_firstlineno + 2
    for part in (
        "2 op(s) of this graph have no lowering to the graph engine:",
        "aten.histc.default x2: no converter, first in ",
        f"test_coverage.py:{line}\n",
        "aten.kthvalue.default x1: no converter, first in ",
        "torch.compiler.disable",
        "TorchAir said: ",
    ):
        assert part in str(error)


def test_a_refusal_that_no_list_foresees_stays_as_torchair_raised_it() -> None:
    compiled = torch.compile(lambda x: torch.cumsum(x, 0), backend=moe_graph.npu_backend())

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        if _args:
            raise ZeroDivisionError("this call cannot be converted")
        return None

    converter = torch.ops.aten.cumsum.default._ge_converter
    torchair.register_fx_node_ge_converter(torch.ops.aten.cumsum.default)(refuse)
    try:
        with pytest.raises(BackendCompilerFailed, match="this call cannot be converted"):
            compiled(torch.randn(3).npu())
    finally:
        torch.ops.aten.cumsum.default._ge_converter = converter
