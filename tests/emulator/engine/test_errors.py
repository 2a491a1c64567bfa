"""What the engine refuses, and that the message says op, node, FX node, argument, got and want."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ge_graphs import SESSION, add, ge, run_ge, serialise
from through_torchair import compiled
from torch import Tensor
from torchair._ge_concrete_graph.compat_ir import ge_op
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

from moe_graph.emulator.engine import session
from moe_graph.emulator.engine.errors import GraphError

X = torch.randn(3, 4)
ZEROS = torch.zeros(3, 4, dtype=torch.int64)


def edited(build: Any, change: Any, *inputs: Tensor) -> bytes:
    """Return a ModelDef after ``change(graph)``."""
    model = ModelDef()
    model.ParseFromString(serialise(build, inputs))
    change(model.graph[0])
    return model.SerializeToString()


def refuses(message: str) -> Any:
    return pytest.raises(GraphError, match=message)


def test_an_unknown_op_is_refused_when_the_graph_is_added() -> None:
    build = lambda x: ge_op("Frobnicate", inputs={"x": x}, outputs=["y"])  # noqa: E731
    with refuses(r"GE op Frobnicate \(node Frobnicate\w*\): an op that the emulator does not"):
        add(serialise(build, (X,)))


def test_an_unknown_op_names_its_fx_node() -> None:
    def name_fx(graph: Any) -> None:
        node = next(op for op in graph.op if op.type == "Frobnicate")
        node.output_desc[0].attr["_fx_tensor_name"].s = b"frob_1-ns.frob.default.OUTPUT.0"

    build = lambda x: ge_op("Frobnicate", inputs={"x": x}, outputs=["y"])  # noqa: E731
    with refuses(r"from FX node frob_1 \(ns\.frob\.default\)"):
        add(edited(build, name_fx, X))


@pytest.mark.parametrize(
    ("build", "inputs", "message"),
    [
        (ge.Add, (X, X.double()), r"Add \(node \w+\): x2: got DT_DOUBLE, want one of DT_FLOAT"),
        (ge.Sigmoid, (X.int(),), r"Sigmoid .*x: got DT_INT32, want one of .*DT_FLOAT"),
        (ge.Add, (X, X[:2]),
         r"Add .*must match.*\(inputs: x1 DT_FLOAT\[3, 4\], x2 DT_FLOAT\[2, 4\]"),
        (lambda a, b: ge.MatMul(a, b, None), (X, X),
         r"MatMul .*x2: got contracted dimension 3, want 4, that of x1"),
        (lambda x: ge.Reshape(x, [5, 2]), (X,), r"Reshape .*invalid for input of size 12"),
        (lambda x: ge.Squeeze(x, axis=[0]), (X,), r"Squeeze .*axis: got 0, of size 3, want a dim"),
        (lambda x, i: ge.GatherV2(x, i, 0), (X, torch.tensor([1, 3])),
         r"GatherV2 .*indices: got values in \[1, 3\], want in \[-3, 3\)"),
        (lambda x, i: ge.ScatterElements(x, i, x, axis=0), (X, torch.full((3, 4), 9)),
         r"ScatterElements .*indices: got values in \[9, 9\], want in \[-3, 3\)"),
        (lambda x: ge.ScatterElements(x, ge.Const(ZEROS), x, reduction="max"), (X,),
         r"ScatterElements .*reduction: got max, want none, add or mul"),
        (lambda x: ge.PadV3(x, [1, 1], 0.0), (X,), r"PadV3 .*paddings: got 2 numbers, want 4"),
        (lambda x: ge.SplitV(x, [1, 1], 0, num_split=2), (X,),
         r"SplitV .*split_dim: got DT_INT64, want one of DT_INT32"),
        (lambda x: ge.ExpandDims(x, ge.Const([0, 1])), (X,),
         r"ExpandDims .*axis: got shape \(2,\), want one element"),
        (lambda x, i: ge.ExpandDims(x, i), (X, torch.tensor([0, 1])),
         r"ExpandDims .*axis: got shape \(2,\), want one element"),
        (lambda x: ge.Unpack(x, num=2), (X,), r"Unpack .*num: got 2, want 3, the size of dim 0"),
    ],
)  # fmt: skip
def test_a_node_that_fails(build: Any, inputs: tuple[Tensor, ...], message: str) -> None:
    with refuses(message):
        run_ge(build, *inputs)


def test_attributes() -> None:
    def drop(graph: Any) -> None:
        del next(op for op in graph.op if op.type == "Muls").attr["value"]

    def invent(graph: Any) -> None:
        next(op for op in graph.op if op.type == "Muls").attr["colour"].s = b"red"

    build = lambda x: ge.Muls(x, value=2.0)  # noqa: E731
    with refuses(r"GE op Muls .*value: got no value, want a value"):
        add(edited(build, drop, X))
    with refuses(r"GE op Muls .*colour: got 'red', want no such attribute"):
        add(edited(build, invent, X))


def test_inputs_of_a_node() -> None:
    def cut(graph: Any) -> None:
        node = next(op for op in graph.op if op.type == "Add")
        node.input[1] = ""

    def misname(graph: Any) -> None:
        next(op for op in graph.op if op.type == "Sqrt").input_desc[0].name = "z"

    with refuses(r"GE op Add .*x2: got nothing, want a tensor"):
        add(edited(ge.Add, cut, X, X))
    with refuses(r"GE op Sqrt .*x: got nothing, want a tensor"):
        add(edited(ge.Sqrt, misname, X))


def test_edges() -> None:
    def to_nowhere(graph: Any) -> None:
        next(op for op in graph.op if op.type == "Sqrt").input[0] = "ghost:0"

    def to_missing_output(graph: Any) -> None:
        next(op for op in graph.op if op.type == "NetOutput").input[0] = "Sqrt:3"

    def in_a_circle(graph: Any) -> None:
        first, second = (op for op in graph.op if op.type == "Sqrt")
        first.input[0] = f"{second.name}:0"

    with refuses("an edge from 'ghost', which is no node of the graph"):
        add(edited(ge.Sqrt, to_nowhere, X))
    with refuses(r"an edge from output 3 of Sqrt, which has 1"):
        add(edited(ge.Sqrt, to_missing_output, X))
    with refuses(r"GE op Sqrt .*a cycle"):
        add(edited(lambda x: ge.Sqrt(ge.Sqrt(x)), in_a_circle, X))


def test_bytes_that_are_no_graph() -> None:
    with refuses("bytes that are no ModelDef"):
        add(b"\xff\xff\xff")
    with refuses("a ModelDef with 0 graphs, want exactly one graph"):
        add(b"")


def test_run_inputs() -> None:
    graph = add(serialise(ge.Sqrt, (X,)))
    with refuses("GE graph: 2 inputs, want 1"):
        session.run(SESSION, graph, [X, X])
    with refuses(r"run input 0: got DT_INT64, want DT_FLOAT"):
        session.run(SESSION, graph, [X.long()])
    with refuses(r"run input 0: got shape \(2, 4\), want shape \(3, 4\)"):
        session.run(SESSION, graph, [X[:2]])
    session.remove_graph(SESSION, graph)
    with refuses(rf"graph {graph} of session {SESSION}, want a graph that was added"):
        session.run(SESSION, graph, [X])


def test_a_result_that_is_not_what_was_declared() -> None:
    def declare(shape: list[int], dtype: int) -> Any:
        def change(graph: Any) -> None:
            desc = next(op for op in graph.op if op.type == "NetOutput").input_desc[0]
            desc.shape.dim[:] = shape
            desc.dtype = dtype

        return change

    float32, int64 = 1, 8
    for change, message in (
        (declare([3, 4], int64), r"graph output 0: got DT_FLOAT, want DT_INT64"),
        (declare([3, 5], float32), r"graph output 0: got shape \(3, 4\), want shape \(3, 5\)"),
        (declare([-1], float32), r"graph output 0: got shape \(3, 4\), want shape \(-1,\)"),
    ):
        graph = add(edited(ge.Sqrt, change, X))
        with refuses(rf"GE op Sqrt .*{message}; the FX node's meta does not say"):
            session.run(SESSION, graph, [X])


@pytest.mark.parametrize(
    ("name", "value"),
    [("ge.exec.precision_mode", "force_fp16"), ("ge.dynamicDims", "1,2;3,4")],
)
def test_options_that_change_results(name: str, value: str) -> None:
    with refuses(rf"option {re.escape(name)}: got '{value}', want"):
        add(serialise(ge.Sqrt, (X,)), **{name: value})


def test_options_that_do_not() -> None:
    options = {"ge.exec.precision_mode": "must_keep_origin_dtype", "ge.topoSortingMode": "1"}
    session.remove_graph(SESSION, add(serialise(ge.Sqrt, (X,)), **options))


def test_the_text_reaches_the_user_of_torch_compile() -> None:
    program = compiled(lambda x, i: x[i])
    with pytest.raises(
        RuntimeError, match=r"GE op IndexByTensor .*from FX node index \(aten\.index"
    ):
        program(X.npu(), torch.tensor([7]).npu())
