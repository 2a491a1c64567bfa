"""Order, liveness, folding and memory of a plan, and what a session tells about a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ge_graphs import SESSION, add, ge, run_ge, serialise
from through_torchair import assert_same
from torch import Tensor
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

from moe_graph.emulator.engine import ir, model, plan, registry, session
from moe_graph.emulator.engine.executor import Executor

X = torch.arange(6.0).reshape(2, 3)


def planned(build: Any, *inputs: Tensor) -> plan.Plan:
    return plan.build(model.parse(serialise(build, inputs)))


def types(built: plan.Plan) -> list[str]:
    return [step.node.type for step in built.steps if not step.reads]


def test_nodes_run_in_the_order_in_which_they_were_written() -> None:
    built = planned(lambda x: [ge.Sin(x), ge.Cos(x), ge.Tan(x)], X)
    assert types(built) == ["Sin", "Cos", "Tan"]


def test_a_control_edge_moves_a_node_back() -> None:
    message = ModelDef()
    message.ParseFromString(serialise(lambda x: [ge.Sin(x), ge.Cos(x), ge.Tan(x)], [X]))
    sin, tan = (
        next(op for op in message.graph[0].op if op.type == name) for name in ("Sin", "Tan")
    )
    sin.input.append(f"{tan.name}:-1")
    built = plan.build(model.parse(message.SerializeToString()))
    assert types(built) == ["Cos", "Tan", "Sin"]


def test_a_writer_waits_for_the_readers_written_before_it() -> None:
    """Sin reads the old value, Cos the new one, although no edge orders them."""
    x, update = X.clone(), X + 10

    def build(x: Any, update: Any) -> list[Any]:
        late = ge.Identity(ge.Identity(ge.Identity(update)))
        before = ge.Sin(x)
        view = ge.Reshape(x, [3, 2])
        ge.Assign(x, late)
        return [before, ge.Sqrt(view), ge.Cos(x)]

    old = X.clone()
    assert_same(run_ge(build, x, update), [old.sin(), old.reshape(3, 2).sqrt(), update.cos()])
    assert_same(x, update)


def test_a_constant_is_never_written() -> None:
    def build(x: Any) -> Any:
        table = ge.Const(torch.zeros(2, 3))
        return ge.InplaceIndexAdd(table, ge.Const([0, 1], 3), x, None, axis=0)

    graph = add(serialise(build, [X]))
    for _ in range(2):
        assert_same(session.run(SESSION, graph, [X]), [X])


def test_what_depends_on_constants_only_is_computed_once() -> None:
    def build(x: Any) -> Any:
        perm = ge.Cast(ge.Range(ge.Const(1, 3), ge.Const(-1, 3), ge.Const(-1, 3)), dst_type=9)
        return ge.Transpose(x, perm)

    built = planned(build, X)
    assert types(built) == ["Transpose"]
    assert_same(Executor(built).run([X]), [X.t()])


def test_a_large_constant_is_not_kept() -> None:
    built = planned(lambda x: ge.Add(ge.Fill([300, 300], 2.0), x), torch.ones(1))
    assert types(built) == ["Fill", "Add"]


def test_a_value_dies_after_its_last_use() -> None:
    def build(x: Any) -> Any:
        a = ge.Sin(x)
        b = ge.Cos(a)
        return ge.Add(ge.Tan(b), a)

    built = planned(build, X)
    alive: set[int] = set(built.input_slots)
    most = 0
    for step in built.steps:
        assert set(step.inputs) <= alive
        alive |= {step.outputs} if isinstance(step.outputs, int) else set(step.outputs)
        most = max(most, len(alive))
        alive -= set(step.dead)
    assert alive == set(built.output_slots)
    assert most == 3


def test_outputs_share_no_memory() -> None:
    x = X.clone()
    results = run_ge(
        lambda x: [x, ge.Identity(x), ge.Reshape(x, [3, 2]), ge.Transpose(x, [1, 0]),
                   ge.Const(torch.ones(2)), *ge.Unpack(ge.Sin(x), num=2)], x,
    )  # fmt: skip
    starts = {each.untyped_storage().data_ptr() for each in results}
    assert len(starts) == len(results)
    assert x.untyped_storage().data_ptr() not in starts
    assert all(each.is_contiguous() for each in results)
    assert_same(results[:4], [X, X, X.reshape(3, 2), X.t()])


def test_results_are_written_where_the_caller_says() -> None:
    """The outputs are the two inputs, swapped."""
    a, b = X.clone(), X + 10
    graph = add(serialise(lambda a, b: [ge.Identity(b), ge.Reshape(a, [2, 3]), ge.Sin(a)], [a, b]))
    results = session.run(SESSION, graph, [a, b], outputs=[a, b, None])
    assert results[0] is a
    assert results[1] is b
    assert_same([a, b, results[2]], [X + 10, X, X.sin()])


def test_optional_inputs_and_dynamic_ones() -> None:
    x = torch.randn(2, 3)
    cat, product = run_ge(
        lambda x: [ge.ConcatV2([x, x, x], 0, N=3), ge.MatMul(x, x, None, transpose_x2=True)], x
    )
    assert_same([cat, product], [torch.cat([x, x, x]), x @ x.t()])


def test_a_list_of_one_output() -> None:
    def build(x: Any) -> list[Any]:
        (rows,) = ge.Unpack(ge.Reshape(x, [1, 6]), num=1)
        (same,) = ge.IdentityN([x])
        return [rows, same]

    graph = add(serialise(build, [X]))
    for _ in range(2):  # the first run takes another path than later ones
        assert_same(session.run(SESSION, graph, [X]), [X.flatten(), X])


def test_one_plan_serves_several_sizes() -> None:
    build = lambda x: ge.Reshape(x, ge.Pack([ge.Gather(ge.Shape(x), 0), -1], N=2))  # noqa: E731
    graph = add(serialise(build, [torch.zeros(1, 1, 1)], dynamic=True))
    for shape in ((2, 3, 4), (5, 1, 2), (1, 2, 3)):
        x = torch.randn(shape)
        assert_same(session.run(SESSION, graph, [x]), [x.flatten(1)])


def test_summary() -> None:
    static = add(serialise(ge.Sqrt, [X]))
    dynamic = add(serialise(ge.Sqrt, [X], dynamic=True))
    assert session.summary(SESSION, static).is_static
    assert not session.summary(SESSION, dynamic).is_static


def test_statistics() -> None:
    graph = add(serialise(lambda x: ge.Sin(ge.Sin(x)), [X]))
    assert session.statistics(SESSION, graph) == {"Data": 1, "Sin": 2, "NetOutput": 1}
    session.remove_graph(SESSION, graph)
    assert (SESSION, graph) not in session.node_counts()


def test_ir_definition() -> None:
    found = session.ir_definition("MoeInitRoutingV2")
    assert found is not None
    assert found.inputs == (("x", "required"), ("expert_idx", "required"))
    assert ("active_num", "VT_INT") in found.attrs
    concat = session.ir_definition("ConcatV2")
    assert concat is not None
    assert concat.inputs[0] == ("x", "dynamic")
    assert session.ir_definition("Frobnicate") is None


def test_every_kernel_has_the_inputs_and_attributes_of_its_prototype() -> None:
    """The names must be GE's; a kernel may leave out optional inputs, which are then refused."""
    for op_type in registry.supported():
        prototype, kernel = ir.definition(op_type), registry.find(op_type)
        assert kernel is not None
        if prototype is None or op_type.startswith("Foreach"):
            continue  # not in this TorchAir, or with prototypes and nodes that disagree on names
        assert {each.name for each in kernel.inputs} <= {name for name, _ in prototype.inputs} or (
            op_type == "BatchMatMul"  # its kernel is that of BatchMatMulV2, with a bias
        ), op_type
        required = {name for name, kind in prototype.inputs if kind == "required"}
        assert required <= {each.name for each in kernel.inputs}, op_type
        attrs = {name for name, _ in prototype.attrs}
        assert set(kernel.attrs) <= attrs, op_type
        assert attrs <= set(kernel.attrs) | kernel.ignored | {"message"}, op_type


@pytest.mark.parametrize("op_type", ["Add", "MatMul", "MaskedFill", "TopKV2"])
def test_prototypes_allow_bf16(op_type: str) -> None:
    prototype = ir.definition(op_type)
    assert prototype is not None
    assert torch.bfloat16 in (prototype.input_arguments[0].dtypes or ())
