"""``eager`` experts of transformers are one graph for moe_graph, and a loop for everyone else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

import moe_graph
from moe_graph.frontends.tracing import Trace, tracing
from moe_graph.frontends.transformers_experts import serve_eager_experts
from tests.frontends.graphs import Graphs, number_of_graphs
from tests.models.running import infer
from tests.models.zoo import build, token_ids
from tests.passes.capturing import result_and_gradients
from tests.passes.families import EXPERTS, FAMILIES, HIDDEN, Family

FAMILY = {family.model: family for family in FAMILIES}

every_option = pytest.mark.parametrize(
    "family",
    # plain; interleaved, transposed, biased; no gate; a norm; transposed; own gate; own activation
    [
        FAMILY[model]
        for model in (
            "mixtral",
            "gpt_oss",
            "nemotron_h",
            "muse_spark",
            "openai_privacy_filter",
            "minimax_m2",
            "deepseek_v3",
        )
    ],
    ids=lambda family: family.model,
)


def _block(model: str = "mixtral") -> nn.Module:
    return FAMILY[model].build(experts="eager").eval()


def _tokens() -> Tensor:
    return torch.randn(2, 9, HIDDEN)


def _own_forward(*_: Any) -> None:
    """Stand in for the forward of an experts class."""


@pytest.fixture
def _registered() -> Iterator[None]:
    mapping = dict(ExpertsInterface._global_mapping)
    yield
    ExpertsInterface._global_mapping = mapping


@every_option
def test_one_graph_equals_the_loop_with_gradients(family: Family) -> None:
    block, x, graphs = family.build(experts="eager").eval(), _tokens(), Graphs()
    expected, expected_gradients = result_and_gradients(block, block, x)
    result, gradients = result_and_gradients(graphs.compile(block, fullgraph=True), block, x)
    assert len(graphs) == 1
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("idle", [0, EXPERTS - 1])
def test_rows_of_experts_elsewhere_give_zero(idle: int) -> None:
    experts, graphs = _block().experts, Graphs()
    experts._is_expert_parallel = True
    x, weights = torch.randn(9, HIDDEN), torch.rand(9, 2)
    ids = torch.randint(0, EXPERTS, (9, 2))
    ids[ids == idle] = EXPERTS  # transformers gives ids of other ranks this number
    ids[3] = EXPERTS

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        result = function(inputs[0], ids, inputs[1])
        return result, torch.autograd.grad(result.square().sum(), inputs)

    result, gradients = run(graphs.compile(experts, fullgraph=True))
    expected, expected_gradients = run(experts)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)
    assert not result[3].any()


def test_model_of_eager_experts_is_rewritten_without_a_word_to_it() -> None:
    ids = token_ids()
    expected = infer(build("mixtral", experts_implementation="eager"), ids)
    backend = moe_graph.npu_backend()
    model = build("mixtral", experts_implementation="eager").npu()
    result = infer(torch.compile(model, backend=backend, fullgraph=True), ids.npu())
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert [layer.status for layer in backend.report.layers] == ["rewritten"] * 2
    assert model.get_experts_implementation() == {"": "eager"}


def test_explain_and_the_named_backend_need_nothing_either() -> None:
    block, x = _block().npu(), _tokens().npu()
    with torch.no_grad():
        assert len(moe_graph.explain(block, x).rewritten) == 1
        torch._dynamo.reset()
        before = len(moe_graph.backend.moe_graph_backend.report.rewritten)
        torch.compile(block, backend="moe_graph", fullgraph=True)(x)
        assert len(moe_graph.backend.moe_graph_backend.report.rewritten) == before + 1


def test_eager_call_runs_the_loop_of_the_class() -> None:
    block, x = _block(), _tokens()
    serve_eager_experts()
    calls: list[str] = []

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Calls():
        block(x)
    assert "index_add_" in calls
    assert not {"sort", "histc"} & set(calls)
    assert ALL_EXPERTS_FUNCTIONS.get_interface("eager", _own_forward) is _own_forward


def test_other_backends_see_the_loop() -> None:
    block, x, graphs = _block(), _tokens(), Graphs()
    graphs.compile(block)(x)
    assert len(graphs) == 1
    assert number_of_graphs(block, x) > 1
    torch._dynamo.reset()
    result = torch.compile(block, backend="eager")(x)
    torch.testing.assert_close(result, block(x), rtol=0, atol=0)


@pytest.mark.parametrize("first", ["moe_graph", "other"])
def test_two_backends_in_one_process(first: str) -> None:
    block, x, served = _block(), _tokens(), Graphs()
    seen: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    compiled = {"moe_graph": served.compile(block), "other": torch.compile(block, backend=other)}
    order = [first, *(compiled.keys() - {first})]
    for name in order * 2:
        torch.testing.assert_close(compiled[name](x), block(x), rtol=1e-5, atol=1e-5)
    assert len(served) == 1
    assert len(seen) > 1
    assert not any("histc" in gm.code for gm in seen)


@pytest.mark.usefixtures("_registered")
def test_eager_entry_of_a_user_is_obeyed() -> None:
    def doubled(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x * 2

    experts, graphs = _block().experts, Graphs()
    ExpertsInterface.register("eager", doubled)
    x, ids = torch.randn(4, HIDDEN), torch.zeros(4, 2, dtype=torch.long)
    result = graphs.compile(experts, fullgraph=True)(x, ids, torch.ones(4, 2))
    torch.testing.assert_close(result, x * 2)


def test_other_entries_and_registries_answer_as_before() -> None:
    serve_eager_experts()
    with tracing(Trace(captures=True)):
        assert ALL_EXPERTS_FUNCTIONS.get_interface("eager", _own_forward) is not _own_forward
        for name in ("grouped_mm", "batched_mm"):
            found = ALL_EXPERTS_FUNCTIONS.get_interface(name, _own_forward)
            assert found is ExpertsInterface._global_mapping[name]
        with pytest.raises(KeyError, match="not a valid experts implementation"):
            ALL_EXPERTS_FUNCTIONS.get_interface("unknown", _own_forward)
        assert ALL_FP8_EXPERTS_FUNCTIONS.get_interface("eager", _own_forward) is _own_forward
        assert ExpertsInterface().get_interface("eager", _own_forward) is _own_forward


_PROGRAM = """
import sys
{first}
import torch
{second}
backend = moe_graph.npu_backend(moe_graph.Config(on_miss="error"))
{third}
config = MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=4)
config._experts_implementation = "eager"
block = MixtralSparseMoeBlock(config).npu()
with torch.no_grad():
    torch.compile(block, backend=backend, fullgraph=True)(torch.randn(1, 6, 32).npu())
assert len(backend.report.rewritten) == 1
"""
_MODEL = (
    "from transformers import MixtralConfig\n"
    "from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock"
)
_PLUGIN = "import moe_graph"
_UNUSED = "assert not any(name.startswith('transformers') for name in sys.modules)\n"


@pytest.mark.parametrize(
    "order",
    [
        (_PLUGIN, _MODEL, ""),
        (_PLUGIN, "", _UNUSED + _MODEL),
    ],
    ids=["model before backend", "model after backend"],
)
def test_order_of_imports_does_not_matter(order: tuple[str, str, str]) -> None:
    program = _PROGRAM.format(first=order[0], second=order[1], third=order[2])
    subprocess.run([sys.executable, "-c", program], check=True)
