"""What crosses between TorchAir and an engine, seen from an engine that only writes it down."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchair
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef
from torchair.core._torchair import get_registered_ir_def

from moe_graph.emulator import bridge


@dataclass
class Summary:
    is_static: bool
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[int]


@dataclass
class Definition:
    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str]]
    attrs: list[tuple[str, str]]


@dataclass
class Recorder:
    """An engine that computes with `compute` whatever graph it gets."""

    compute: Callable[..., list[torch.Tensor]] = lambda *inputs: [inputs[0] + 1]
    graphs: dict[tuple[int, int], Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    addresses: list[int] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    removed: int = 0
    filled: list[bool] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def add_graph(self, session: int, graph: int, model: bytes, options: dict[str, str]) -> None:
        parsed = ModelDef()
        parsed.ParseFromString(model)
        self.graphs[session, graph] = parsed.graph[0]
        self.options = options

    def summary(self, session: int, graph: int) -> Summary:
        nodes = self.graphs[session, graph].op
        data = [node for node in nodes if node.type == "Data"]
        (net_output,) = [node for node in nodes if node.type == "NetOutput"]
        return Summary(
            all(dim >= 0 for node in data for dim in node.output_desc[0].shape.dim),
            [tuple(desc.shape.dim) for desc in net_output.input_desc],
            list(self.graphs[session, graph].attr["_output_dtypes"].list.i),
        )

    def run(
        self,
        session: int,
        graph: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor]:
        self.addresses = [tensor.data_ptr() for tensor in inputs]
        self.seen = inputs
        self.threads.add(threading.get_ident())
        results = self.compute(*inputs)
        targets = outputs or [None] * len(results)
        self.filled = [target is not None for target in targets]
        return [
            result if target is None else target.copy_(result)
            for target, result in zip(targets, results, strict=True)
        ]

    def remove_graph(self, session: int, graph: int) -> None:
        self.removed += 1

    def ir_definition(self, op_type: str) -> Definition | None:
        if op_type == "Broken":
            raise ValueError("the table is broken")
        if op_type != "Known":
            return None
        return Definition(
            [("x", "required"), ("y", "optional"), ("z", "dynamic")],
            [("out", "required")],
            [("k", "VT_INT"), ("dims", "VT_LIST_INT")],
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    module = types.ModuleType(bridge.ENGINE_MODULE)
    for name in ("add_graph", "summary", "run", "remove_graph", "ir_definition"):
        setattr(module, name, getattr(recorder, name))
    monkeypatch.setitem(sys.modules, bridge.ENGINE_MODULE, module)
    torch._dynamo.reset()
    yield recorder
    torch._dynamo.reset()
    gc.collect()


def compiled(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    return torch.compile(
        function, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )


def handed_over() -> int:
    assert bridge._bridge is not None
    return len(bridge._bridge._handed_over)


def test_static_graph_runs_in_the_memory_of_its_tensors(engine: Recorder) -> None:
    x = torch.randn(3, 4, device="npu")
    result = compiled(lambda x: x + 1)(x)
    torch.testing.assert_close(result.cpu(), x.cpu() + 1)
    assert result.device == x.device
    assert engine.addresses == [x.data_ptr()]
    assert engine.filled == [True]
    assert all(isinstance(value, str) for value in engine.options.values())


def test_dynamic_graph_hands_its_memory_over(engine: Recorder) -> None:
    before = handed_over()
    function = compiled(lambda x: x + 1, dynamic=True)
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4, device="npu")
        result = function(x)
        torch.testing.assert_close(result.cpu(), x.cpu() + 1)
        assert engine.filled == [False]
        assert handed_over() == before + 1
        del result
        gc.collect()
        assert handed_over() == before


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8],
)
def test_dtypes(engine: Recorder, dtype: torch.dtype, dynamic: bool) -> None:
    x = torch.arange(6).view(2, 3).to(dtype).npu()
    result = compiled(lambda x: x + 1, dynamic)(x)
    assert engine.seen[0].dtype == result.dtype == dtype
    assert torch.equal(result.cpu(), x.cpu() + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensor_without_elements(engine: Recorder, dynamic: bool) -> None:
    engine.compute = lambda *inputs: [torch.empty(0, 4)]  # TorchAir may fold such an input away
    x = torch.empty(0, 4, device="npu")
    result = compiled(lambda x: x + 1, dynamic)(x)
    assert result.shape == (0, 4)


def test_scalar(engine: Recorder) -> None:
    result = compiled(lambda x: x + 1)(torch.tensor(2.0, device="npu"))
    assert result.item() == 3.0


def test_views_of_inputs_that_stay_are_kept(engine: Recorder) -> None:
    function = compiled(lambda x, w: x + w, dynamic=False)
    engine.compute = lambda x, w: [x + w]
    w = torch.randn(3, 4, device="npu")
    x = torch.randn(3, 4, device="npu")
    function(x, w)
    first = engine.seen
    w.add_(1)
    other = torch.randn(3, 4, device="npu")
    torch.testing.assert_close(function(other, w).cpu(), other.cpu() + w.cpu())
    assert any(tensor is old for tensor in engine.seen for old in first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_error_of_the_engine_is_the_message(engine: Recorder, dynamic: bool) -> None:
    def fail(*inputs: torch.Tensor) -> list[torch.Tensor]:
        raise ValueError("op Add, node add_1: got int8, want float\nlayer model.layers.0 ✓")

    engine.compute = fail
    with pytest.raises(RuntimeError) as caught:
        compiled(lambda x: x + 1, dynamic)(torch.ones(2, device="npu"))
    assert str(caught.value).startswith(
        "op Add, node add_1: got int8, want float\nlayer model.layers.0 ✓"
    )


def test_error_while_a_graph_is_added(engine: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_graph(*arguments: Any) -> None:
        raise KeyError("no such op")

    monkeypatch.setattr(sys.modules[bridge.ENGINE_MODULE], "add_graph", add_graph)
    with pytest.raises(RuntimeError, match="no such op"):
        compiled(lambda x: x + 1)(torch.ones(2, device="npu"))


def test_error_in_another_thread(engine: Recorder) -> None:
    def fail(*inputs: torch.Tensor) -> list[torch.Tensor]:
        raise ValueError("from the thread")

    engine.compute = fail
    caught: list[str] = []

    def work() -> None:
        try:
            compiled(lambda x: x + 1)(torch.ones(2, device="npu"))
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert caught[0].startswith("from the thread")


def test_graphs_are_removed(engine: Recorder) -> None:
    compiled(lambda x: x + 1)(torch.ones(2, device="npu"))
    assert engine.removed == 0
    torch._dynamo.reset()
    gc.collect()
    assert engine.removed == 1


def test_updated_input_of_a_dynamic_graph_stays_where_it_is() -> None:
    """With the engine of this project: such a graph brings memory for one of its two outputs."""

    def update(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    torch._dynamo.reset()
    gc.collect()
    before = handed_over()
    function = compiled(update, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4, device="npu")
        want, address = x.cpu() + 1, x.data_ptr()
        result = function(x)
        assert handed_over() == before + 1
        assert x.data_ptr() == address
        torch.testing.assert_close(x.cpu(), want)
        torch.testing.assert_close(result.cpu(), want * 2)
        del result
        gc.collect()
        assert handed_over() == before


def test_two_graphs_have_their_own_numbers(engine: Recorder) -> None:
    compiled(lambda x: x + 1)(torch.ones(2, device="npu"))
    compiled(lambda x: 1 + x)(torch.ones(3, device="npu"))
    assert len(engine.graphs) == 2


def test_definitions_of_operators(engine: Recorder) -> None:
    compiled(lambda x: x + 1)(torch.ones(2, device="npu"))  # TorchAir asks a live session only
    assert get_registered_ir_def("Known") == (
        "SUCCESS",
        [("x", "required"), ("y", "optional"), ("z", "dynamic")],
        [("out", "required")],
        [("k", "VT_INT"), ("dims", "VT_LIST_INT")],
    )
    assert get_registered_ir_def("Unknown")[0] == "ERROR"
    assert get_registered_ir_def("Broken")[0] == "ERROR"


def test_definitions_answer_compatibility(engine: Recorder) -> None:
    check = torchair.core._torchair.check_cann_compat
    assert check("Known", ["x", "z12"], ["k"]) == ""
    assert "w" in check("Known", ["w"], [])
    assert "missing" in check("Known", [], ["missing"])
    assert "Unknown" in check("Unknown", [], [])


def record(address: int, size: int, number: int, *dims: int) -> tuple[int, ...]:
    return (address, size, number, 0, len(dims), *dims)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (record(512, 4, 13, 1), TypeError, r"shape \[1\]: ge::DataType 13 has no torch dtype"),
        (record(0, 12, 0, 3), ValueError, r"shape \[3\] and dtype torch.float32: got no memory"),
    ],
)
def test_records_that_make_no_tensor(
    broken: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bridge._view(broken)
