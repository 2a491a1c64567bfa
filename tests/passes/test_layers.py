"""Layers in company: several in a graph, checkpointed, with more in the body than products."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from tests.passes.capturing import Capture, compile_rewritten, name_of, result_and_gradients
from tests.passes.handwritten import (
    COMBINES,
    EXPERTS,
    HIDDEN,
    INNER,
    TOKENS,
    TOP_K,
    HandwrittenMoe,
    Routing,
    grouped_mm,
)


def check_all_rewritten(module: nn.Module, layers: int) -> Capture:
    x = torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module)
    result, gradients = result_and_gradients(compiled, module, x)

    assert [layer.status for layer in capture.layers] == ["rewritten"] * layers, [
        str(reason) for layer in capture.layers for reason in layer.reasons
    ]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    return capture


class Stack(nn.Module):
    """Layers one after the other, each reading the result of the one before directly."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_two_layers_in_a_row() -> None:
    capture = check_all_rewritten(Stack(HandwrittenMoe(), HandwrittenMoe()), layers=2)
    assert [layer.path for layer in capture.layers] == ["layers.0", "layers.1"]
    assert capture.ops["moe_init_routing_v2"] == 2


def test_one_layer_used_twice() -> None:
    layer = HandwrittenMoe()
    check_all_rewritten(Stack(layer, nn.Tanh(), layer), layers=2)


def test_layer_and_kept_layer_in_one_graph() -> None:
    broken = HandwrittenMoe(dispatch=lambda r: r.x[r.order // (TOP_K + 1)])
    module, x = Stack(HandwrittenMoe(), broken, HandwrittenMoe()), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert [layer.status for layer in capture.layers] == ["rewritten", "kept", "rewritten"]


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layer, x, use_reentrant=False)


def test_checkpointed_layer() -> None:
    capture = check_all_rewritten(Checkpointed(HandwrittenMoe()), layers=1)
    (gm,) = capture.modules
    bodies = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
    calls = {name_of(n) for m in bodies for n in m.graph.nodes if n.op.startswith("call")}
    assert "moe_finalize_routing_v2" in calls
    assert "sort" not in calls


def test_shared_expert_and_residual_stay() -> None:
    class WithShared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = HandwrittenMoe()
            self.shared = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.moe(x) + functional.silu(self.shared(x))

    capture = check_all_rewritten(WithShared(), layers=1)
    assert capture.ops["silu"] == 1
    assert capture.ops["linear"] == 2


def _weights_before_down(module: Any, r: Routing, rows: Tensor) -> Tensor:
    gate, up = grouped_mm(rows, module.w13.transpose(1, 2), offs=r.ends).chunk(2, -1)
    hidden = functional.silu(gate) * up * r.weights.view(-1)[r.order].unsqueeze(-1)
    return grouped_mm(hidden, module.w2, offs=r.ends)


def _weights_on_input(module: Any, r: Routing, rows: Tensor) -> Tensor:
    return module.experts(r, rows * r.weights.reshape(-1)[r.order].reshape(-1, 1))


@pytest.mark.parametrize("body", [_weights_before_down, _weights_on_input])
def test_weights_inside_the_body_are_brought_into_the_new_order(body: Any) -> None:
    module = HandwrittenMoe(body=body, combine=COMBINES["unweighted"])
    capture = check_all_rewritten(module, layers=1)
    assert capture.ops["moe_init_routing_v2"] == 2
    assert "sort" not in capture.ops


class Biased(HandwrittenMoe):
    def __init__(self, **pieces: Any) -> None:
        super().__init__(**pieces)
        self.b13 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))


def _bias_added(module: Any, r: Routing, rows: Tensor) -> Tensor:
    h = grouped_mm(rows, module.w13.transpose(1, 2), offs=r.ends) + module.b13[r.sorted_ids]
    gate, up = h.chunk(2, -1)
    return grouped_mm(functional.silu(gate) * up, module.w2, offs=r.ends)


def _bias_scaled(module: Any, r: Routing, rows: Tensor) -> Tensor:
    h = grouped_mm(rows, module.w13.transpose(1, 2), offs=r.ends) + 2 * module.b13[r.sorted_ids]
    gate, up = h.split(INNER, dim=-1)
    return grouped_mm(up * functional.silu(gate), module.w2, offs=r.ends)


def test_bias_goes_into_the_product() -> None:
    capture = check_all_rewritten(Biased(body=_bias_added), layers=1)
    assert capture.ops["add"] == 0
    assert capture.ops["moe_init_routing_v2"] == 1
    assert capture.ops["swi_glu"] == 1


def test_other_use_of_the_bias_stays_in_the_body() -> None:
    capture = check_all_rewritten(Biased(body=_bias_scaled), layers=1)
    assert capture.ops["add"] == 1
    assert "sort" not in capture.ops
    assert capture.ops["swi_glu"] == 1


def _up_first(module: Any, r: Routing, rows: Tensor) -> Tensor:
    up, gate = grouped_mm(rows, module.w13.transpose(1, 2), offs=r.ends).chunk(2, -1)
    return grouped_mm(functional.silu(gate) * up, module.w2, offs=r.ends)


def _relu_gate(module: Any, r: Routing, rows: Tensor) -> Tensor:
    gate, up = grouped_mm(rows, module.w13.transpose(1, 2), offs=r.ends).chunk(2, -1)
    return grouped_mm(functional.relu(gate) * up, module.w2, offs=r.ends)


def _two_products(module: Any, r: Routing, rows: Tensor) -> Tensor:
    w1, w3 = module.w13[:, :INNER], module.w13[:, INNER:]
    gate = grouped_mm(rows, w1.transpose(1, 2).contiguous(), offs=r.ends)
    up = grouped_mm(rows, w3.transpose(1, 2), offs=r.ends)
    return grouped_mm(functional.silu(gate) * up, module.w2, offs=r.ends)


def _norms(module: Any, r: Routing, rows: Tensor) -> Tensor:
    rows = functional.layer_norm(rows, (HIDDEN,)) * torch.linspace(0.5, 1.5, HIDDEN)
    return functional.rms_norm(module.experts(r, rows.float()), (HIDDEN,)).clamp(-2, 2) - 0.5


@pytest.mark.parametrize("body", [_up_first, _relu_gate, _two_products, _norms])
def test_body_stays_as_it_is(body: Any) -> None:
    capture = check_all_rewritten(HandwrittenMoe(body=body), layers=1)
    assert capture.ops["swi_glu"] == (1 if body is _norms else 0)
    assert capture.ops["grouped_matmul_single"] == (3 if body is _two_products else 2)


def _in_place_weights(r: Routing, y: Tensor) -> Tensor:
    y.mul_(r.weights.view(-1)[r.order].unsqueeze(-1))
    return y[torch.argsort(r.order)].view(-1, TOP_K, HIDDEN).sum(1)


def test_rows_weighted_in_place() -> None:
    capture = check_all_rewritten(HandwrittenMoe(combine=_in_place_weights), layers=1)
    assert "sort" not in capture.ops


def _cast_weights(r: Routing, y: Tensor) -> Tensor:
    weighted = y.float() * r.weights.view(-1)[r.order].to(y.dtype).unsqueeze(-1)
    return weighted[torch.argsort(r.order)].view(-1, TOP_K, HIDDEN).sum(1).to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_the_dtype_that_they_multiply_with(dtype: torch.dtype) -> None:
    module, x = HandwrittenMoe(combine=_cast_weights).to(dtype), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    with torch.no_grad():
        result, expected = compiled(x.to(dtype)), module(x.to(dtype))
        exact = module.float()(x)
    assert [layer.status for layer in capture.layers] == ["rewritten"]
    assert "index" not in capture.ops
    assert result.dtype == dtype
    allowed = 2 * (expected.float() - exact).abs().max() + 1e-5
    assert (result.float() - exact).abs().max() <= allowed


def test_ids_and_weights_by_batch_and_position() -> None:
    class Batched(HandwrittenMoe):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x.view(3, -1, HIDDEN)).softmax(-1).topk(TOP_K)
            self.route = lambda x: Routing(x, weights.view(-1, TOP_K), ids)
            return super().forward(x)

    check_all_rewritten(Batched(), layers=1)


def _by_make_fx(module: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,))

    parameters = dict(module.named_parameters())
    gm = make_fx(call, tracing_mode="fake")(parameters, x)
    gm.forward = partial(gm.forward, parameters)
    return gm


def _by_export(module: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    tokens = torch.export.Dim("tokens", min=2)
    return torch.export.export(module, (x,), dynamic_shapes=({0: tokens},)).module()


@pytest.mark.parametrize("trace", [_by_make_fx, _by_export])
@pytest.mark.parametrize("combine", ["rows-then-sum", "slots-then-sum", "index_add"])
def test_aten_graph_is_read_by_the_same_rules(trace: Any, combine: str) -> None:
    module, x = HandwrittenMoe(combine=COMBINES[combine]), torch.randn(TOKENS, HIDDEN)
    gm = trace(module, x)
    (layer,) = rewrite_moe_layers(gm, Config())

    assert layer.status == "rewritten", [str(reason) for reason in layer.reasons]
    assert "sort" not in {name_of(n) for n in gm.graph.nodes if n.op == "call_function"}
    torch.testing.assert_close(gm.forward(x), module(x), rtol=1e-5, atol=1e-5)


def test_rewriting_twice_changes_nothing_more() -> None:
    compiled, capture = compile_rewritten(HandwrittenMoe())
    compiled(torch.randn(TOKENS, HIDDEN))
    (gm,) = capture.modules
    before = [node.format_node() for node in gm.graph.nodes]
    assert rewrite_moe_layers(gm, Config()) == []
    assert [node.format_node() for node in gm.graph.nodes] == before
