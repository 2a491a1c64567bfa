"""Every spelling of an op is one call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from moe_graph.passes.canonical import Call, canonical
from moe_graph.passes.memory import Memory

aten = torch.ops.aten


def example_graph() -> tuple[Graph, Node, Node]:
    """Return a graph with a float matrix and an integer vector."""
    graph = Graph()
    matrix, vector = graph.placeholder("matrix"), graph.placeholder("vector")
    matrix.meta["example_value"] = torch.randn(6, 4)
    vector.meta["example_value"] = torch.arange(6)
    return graph, matrix, vector


def call_of(make: Callable[[Graph, Node, Node], Node]) -> Call:
    graph, matrix, vector = example_graph()
    node = make(graph, matrix, vector)
    values = {matrix: matrix.meta["example_value"], vector: vector.meta["example_value"]}
    args = torch.fx.node.map_arg(node.args, values.__getitem__)
    kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        node.meta["example_value"] = getattr(args[0].clone(), str(node.target))(*args[1:], **kwargs)
    else:
        args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        node.meta["example_value"] = node.target(*args, **kwargs)  # type: ignore[operator]
    return canonical(node)


def function(target: Any, *args: Any, **kwargs: Any) -> Callable[[Graph, Node, Node], Node]:
    """Return a maker of a call; "m" and "v" stand for the matrix and the vector."""

    def make(graph: Graph, matrix: Node, vector: Node) -> Node:
        known = {"m": matrix, "v": vector}

        def real(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(real, value))
            return known.get(value, value) if isinstance(value, str) else value

        named = {key: real(value) for key, value in kwargs.items()}
        if isinstance(target, str):
            return graph.call_method(target, tuple(map(real, args)), named)
        return graph.call_function(target, tuple(map(real, args)), named)

    return make


@pytest.mark.parametrize(
    ("op", "wanted", "make"),
    [
        ("sort", {"stable": False, "dim": -1}, function(torch.sort, "v")),
        ("sort", {"stable": True, "dim": 0}, function("sort", "v", stable=True, dim=0)),
        ("sort", {"stable": True}, function(aten.sort.stable, "v", stable=True)),
        ("sort", {"descending": True}, function(aten.sort.default, "v", -1, True)),
        ("argsort", {"stable": True}, function("argsort", "v", stable=True)),
        ("topk", {"k": 2, "dim": -1}, function("topk", "m", 2)),
        ("topk", {"k": 2, "dim": 1}, function(aten.topk.default, "m", 2, 1)),
        ("div", {"rounding_mode": "floor", "other": 2}, function(operator.floordiv, "v", 2)),
        ("div", {"rounding_mode": "floor"}, function(torch.floor_divide, "v", 2)),
        ("div", {"rounding_mode": "floor"}, function("floor_divide", "v", 2)),
        ("div", {"rounding_mode": "floor"}, function(aten.floor_divide.default, "v", 2)),
        ("div", {"rounding_mode": "trunc"}, function("div", "v", 2, rounding_mode="trunc")),
        ("div", {"rounding_mode": None}, function(operator.truediv, "m", 2)),
        ("index", {}, function(operator.getitem, "m", "v")),
        ("index", {}, function(operator.getitem, "m", ("v", slice(None)))),
        ("index", {}, function(aten.index.Tensor, "m", ["v"])),
        ("slice", {"index": (slice(1, 3),)}, function(operator.getitem, "m", slice(1, 3))),
        ("slice", {}, function(aten.slice.Tensor, "m", 1, 0, 2)),
        ("cast", {}, function("float", "v")),
        ("cast", {}, function("to", "v", torch.int32)),
        ("cast", {}, function("type_as", "v", "m")),
        ("cast", {}, function(aten._to_copy.default, "v", dtype=torch.int32)),
        ("reshape", {}, function("view", "m", -1)),
        ("reshape", {}, function("unsqueeze", "v", -1)),
        ("reshape", {}, function(torch.flatten, "m")),
        ("reshape", {}, function(aten.view.default, "m", [24])),
        ("permute", {}, function("t", "m")),
        ("permute", {}, function(torch.transpose, "m", 0, 1)),
        ("permute", {}, function(getattr, "m", "mT")),
        ("cumsum", {"dim": 0, "dtype": None}, function(torch.cumsum, "v", 0)),
        ("silu", {}, function(functional.silu, "m")),
        ("max", {"dim": -1, "keepdim": True}, function("max", "m", dim=-1, keepdim=True)),
        ("amax", {}, function("max", "m")),
        ("arange", {"start": 0, "end": 5, "step": 1}, function(torch.arange, 5)),
        ("arange", {"start": 1, "end": 5}, function(torch.arange, 1, 5)),
        ("arange", {"start": 0, "end": 5}, function(aten.arange.default, 5)),
    ],
)
def test_spelling_is_canonical(op: str, wanted: dict[str, Any], make: Any) -> None:
    call = call_of(make)
    assert call.op == op
    assert call.known
    assert call.writes is None
    for name, value in wanted.items():
        assert call[name] == value


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("add", function("add_", "m", 1)),
        ("div", function(operator.itruediv, "m", 2)),
        ("mul", function(aten.mul_.Tensor, "m", 2)),
        ("masked_fill", function("masked_fill_", "m", True, 0.0)),
        ("relu", function(functional.relu, "m", inplace=True)),
        ("index_put", function(operator.setitem, "m", "v", 0.0)),
    ],
)
def test_write_in_place_names_what_it_writes(op: str, make: Any) -> None:
    graph, matrix, vector = example_graph()
    call = canonical(make(graph, matrix, vector))
    assert call.op == op
    assert call.writes is matrix


def test_unknown_function_is_not_known() -> None:
    def helper(x: Tensor) -> Tensor:
        return x

    graph, matrix, _ = example_graph()
    call = canonical(graph.call_function(helper, (matrix,)))
    assert not call.known


def test_write_to_a_view_reaches_everything_that_shares_memory() -> None:
    graph, matrix, vector = example_graph()
    view = graph.call_method("view", (matrix, -1))
    copy = graph.call_method("add", (matrix, 1))
    write = graph.call_method("zero_", (view,))
    for node in (view, copy, write):
        node.meta["example_value"] = torch.zeros(24)
    memory = Memory()
    for position, node in enumerate(graph.nodes):
        memory.note(canonical(node), position)

    assert set(memory.sharing(matrix)) == {matrix, view, write}
    assert set(memory.sharing(copy)) == {copy}
    assert memory.written_between(matrix, 0, 9) is view
    assert memory.written_between(copy, 0, 9) is None
    assert memory.written_between(vector, 0, 9) is None


def test_results_of_a_fresh_tuple_do_not_share_memory() -> None:
    graph, matrix, _ = example_graph()
    topk = graph.call_function(torch.topk, (matrix, 2))
    values = graph.call_function(operator.getitem, (topk, 0))
    again = graph.call_function(operator.getitem, (topk, 0))
    indices = graph.call_function(operator.getitem, (topk, 1))
    topk.meta["example_value"] = torch.randn(6, 4).topk(2)
    memory = Memory()
    for position, node in enumerate(graph.nodes):
        memory.note(canonical(node), position)

    assert set(memory.sharing(values)) == {values, again}
    assert set(memory.sharing(indices)) == {indices}
