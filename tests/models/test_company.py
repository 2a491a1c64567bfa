"""Several models, backends and threads in one process do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moe_graph
from tests.models.running import compile_on_npu, infer
from tests.models.zoo import build, token_ids

IDS = token_ids()


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> None:
    torch._dynamo.reset()


def assert_right(compiled, model: str) -> None:
    got, want = infer(compiled, IDS.npu()), infer(build(model), IDS)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_models_with_and_without_experts_share_a_backend() -> None:
    backend = moe_graph.npu_backend()
    models = {name: build(name).npu() for name in ("mixtral", "qwen3", "qwen3_moe")}
    compiled = {
        name: torch.compile(model, backend=backend, fullgraph=True)
        for name, model in models.items()
    }
    for name in models:
        assert_right(compiled[name], name)
    for name in reversed(models):
        assert_right(compiled[name], name)
    assert backend.report.graphs == 3
    assert [layer.graph for layer in backend.report.layers] == [0, 0, 2, 2]
    assert not backend.report.kept


def test_the_same_model_twice_with_one_backend() -> None:
    model, backend = build("mixtral").npu(), moe_graph.npu_backend()
    for _ in range(2):
        torch._dynamo.reset()
        assert_right(torch.compile(model, backend=backend, fullgraph=True), "mixtral")
    assert backend.report.graphs == 2
    assert len(backend.report.rewritten) == 4


def test_the_same_model_with_two_backends() -> None:
    model = build("mixtral").npu()
    backends = [moe_graph.npu_backend(), moe_graph.npu_backend()]
    for backend in backends:
        torch._dynamo.reset()
        assert_right(torch.compile(model, backend=backend, fullgraph=True), "mixtral")
    assert [len(backend.report.rewritten) for backend in backends] == [2, 2]


def test_compiling_in_a_thread_and_running_in_another() -> None:
    compiled, backend = compile_on_npu(build("mixtral"))
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(assert_right, compiled, "mixtral").result()
    assert_right(compiled, "mixtral")
    assert backend.report.graphs == 1


def test_two_threads_at_once() -> None:
    names = ("mixtral", "qwen3_moe")
    made = [compile_on_npu(build(name)) for name in names]
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(assert_right, compiled, name)
            for (compiled, _), name in zip(made, names, strict=True)
        ]
    for each in work:
        each.result()
    assert [len(backend.report.rewritten) for _, backend in made] == [2, 2]
