"""torch_npu's MoE operators on the emulated device, eagerly and compiled, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

import moe_graph
from moe_graph import OpError
from moe_graph.emulator.engine import session
from moe_graph.ops.npu_forms import FORMS

EXPERTS, TOP_K, HIDDEN = 4, 2, 6
npu = torch.ops.npu

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _ids(tokens: int) -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(torch.int32)


def _order(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.sort(ids.reshape(-1).long(), stable=True).indices
    return order, torch.sort(order).indices.to(torch.int32)


def _run(function: Function, how: str, inputs: tuple[torch.Tensor, ...]) -> Any:
    if how != "eager":
        function = torch.compile(
            function, backend=moe_graph.npu_backend(), dynamic=how == "dynamic", fullgraph=True
        )
    return function(*(tensor.npu() for tensor in inputs))


HOW = pytest.mark.parametrize("how", ["eager", "static", "dynamic"])


@HOW
def test_a_layer_of_permute_and_unpermute_trains(how: str) -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, places = torch_npu.npu_moe_token_permute(x, ids)
        y: torch.Tensor = torch_npu.npu_moe_token_unpermute(rows * 3, places, probs)
        return y

    x, ids, probs = torch.randn(7, HIDDEN), _ids(7), torch.rand(7, TOP_K)
    on_device = [x.npu().requires_grad_(), ids.npu(), probs.npu().requires_grad_()]
    if how != "eager":
        layer = torch.compile(
            layer, backend=moe_graph.npu_backend(), dynamic=how == "dynamic", fullgraph=True
        )
    y = layer(*on_device)
    y.square().sum().backward()
    x.requires_grad_()
    probs.requires_grad_()
    want = 3 * x * probs.sum(1, keepdim=True)
    want.square().sum().backward()
    torch.testing.assert_close(y.cpu(), want)
    torch.testing.assert_close(on_device[0].grad.cpu(), x.grad)
    torch.testing.assert_close(on_device[2].grad.cpu(), probs.grad)


@HOW
@pytest.mark.parametrize("num_out_tokens", [5, -4])
def test_permuting_leaves_rows_out(how: str, num_out_tokens: int) -> None:
    x, ids = torch.randn(7, HIDDEN), _ids(7)
    order, places = _order(ids)
    rows = num_out_tokens if num_out_tokens > 0 else 14 + num_out_tokens
    got = _run(lambda x, ids: npu.npu_moe_token_permute(x, ids, num_out_tokens), how, (x, ids))
    assert torch.equal(got[0].cpu(), x[order[:rows] // TOP_K])
    assert torch.equal(got[1].cpu(), places)


@HOW
def test_init_routing_v2_is_the_third(how: str) -> None:
    def route(x: torch.Tensor, ids: torch.Tensor) -> Any:
        return npu.npu_moe_init_routing_v2(
            x, ids, expert_num=EXPERTS, expert_tokens_num_type=1, expert_tokens_num_flag=True
        )[:3]

    x, ids = torch.randn(7, HIDDEN), _ids(7)
    order, places = _order(ids)
    rows, row_idx, counts = (tensor.cpu() for tensor in _run(route, how, (x, ids)))
    assert torch.equal(rows, x[order // TOP_K])
    assert torch.equal(row_idx, places)
    assert torch.equal(counts, torch.bincount(ids.reshape(-1), minlength=EXPERTS))


@HOW
def test_finalize_routing(how: str) -> None:
    rows, scales, shared = torch.randn(14, HIDDEN), torch.rand(7, TOP_K), torch.randn(7, HIDDEN)
    places = torch.randperm(14).to(torch.int32)

    def combine(*given: torch.Tensor) -> Any:
        rows, shared, scales, places = given
        return npu.npu_moe_finalize_routing(rows, shared, None, None, scales, places, None, 2)

    got = _run(combine, how, (rows, shared, scales, places)).cpu()
    want = shared + (rows[places.long()].view(7, TOP_K, HIDDEN) * scales.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(got, want)


@HOW
def test_gating(how: str) -> None:
    x = torch.randn(7, EXPERTS)
    values, indices = torch.softmax(x, -1).topk(TOP_K)
    for function in (
        lambda x: npu.npu_moe_gating_top_k_softmax(x, k=TOP_K)[:2],
        lambda x: npu.npu_moe_gating_top_k_softmax_v2(x, k=TOP_K)[:2],
        lambda x: npu.npu_moe_gating_top_k(x, TOP_K)[:2],
    ):
        torch._dynamo.reset()
        got = _run(function, how, (x,))
        torch.testing.assert_close(got[0].cpu(), values)
        assert torch.equal(got[1].cpu(), indices.int())


@pytest.mark.parametrize("how", ["eager", "static"])
def test_a_sigmoid_router_trains(how: str) -> None:
    def route(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = npu.npu_moe_gating_top_k(x, TOP_K, norm_type=1, out_flag=True)[0]
        return y

    x = torch.randn(7, EXPERTS)
    on_device = x.npu().requires_grad_()
    if how != "eager":
        route = torch.compile(route, backend=moe_graph.npu_backend(), fullgraph=True)
    route(on_device).square().sum().backward()
    x.requires_grad_()
    chosen = x.sigmoid().topk(TOP_K).values
    (chosen / chosen.sum(1, keepdim=True)).square().sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), x.grad)


@HOW
def test_compute_expert_tokens(how: str) -> None:
    ids = _ids(7).reshape(-1).sort().values
    got = _run(lambda ids: npu.npu_moe_compute_expert_tokens(ids, EXPERTS), how, (ids,))
    assert torch.equal(got.cpu(), torch.bincount(ids, minlength=EXPERTS).cumsum(0).int())


@HOW
def test_re_routing(how: str) -> None:
    counts = torch.tensor([[1, 2, 0], [3, 0, 1]], dtype=torch.int32)
    tokens = torch.randn(7, HIDDEN).half()
    got = _run(lambda t, c: npu.npu_moe_re_routing(t, c)[::3], how, (tokens, counts))
    order = torch.tensor([0, 3, 4, 5, 1, 2, 6])
    assert torch.equal(got[0].cpu(), tokens[order])
    assert got[1].cpu().tolist() == [4, 2, 1]


@pytest.mark.parametrize("how", ["eager", "static"])
@pytest.mark.parametrize("pads", [False, True], ids=["dropless", "drop_and_pad"])
def test_a_layer_with_a_routing_map_trains(how: str, pads: bool) -> None:
    tokens, capacity = 6, 3
    mask = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, _ids(tokens).long(), True)
    out = EXPERTS * capacity if pads else tokens * TOP_K

    def layer(x: torch.Tensor, mask: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, _, places = npu.npu_moe_token_permute_with_routing_map(
            x, mask, num_out_tokens=out, drop_and_pad=pads
        )
        y: torch.Tensor = npu.npu_moe_token_unpermute_with_routing_map(
            rows, places, list(x.shape), probs=probs, routing_map=mask, drop_and_pad=pads
        )
        return y

    x, probs = torch.randn(tokens, HIDDEN), torch.rand(tokens, EXPERTS)
    on_device = [x.npu().requires_grad_(), mask.npu(), probs.npu().requires_grad_()]
    if how != "eager":
        layer = torch.compile(layer, backend=moe_graph.npu_backend(), fullgraph=True)
    y = layer(*on_device)
    y.square().sum().backward()
    x.requires_grad_()
    probs.requires_grad_()
    kept = mask
    if pads:
        order = mask.t().int().sort(dim=-1, descending=True, stable=True).indices[:, :capacity]
        kept = torch.zeros(EXPERTS, tokens, dtype=torch.bool).scatter_(1, order, True).t()
    want = x * (probs * kept).sum(1, keepdim=True)
    want.square().sum().backward()
    torch.testing.assert_close(y.cpu(), want)
    torch.testing.assert_close(on_device[0].grad.cpu(), x.grad)
    torch.testing.assert_close(on_device[2].grad.cpu(), probs.grad)


def test_a_compiled_layer_is_one_node_each() -> None:
    before = set(session.node_counts())

    def layer(x: torch.Tensor, ids: torch.Tensor) -> Any:
        rows, places = npu.npu_moe_token_permute(x, ids)
        return npu.npu_moe_token_unpermute(rows, places, x.new_ones((7, TOP_K)))

    _run(layer, "static", (torch.randn(7, HIDDEN), _ids(7)))
    (graph,) = [nodes for key, nodes in session.node_counts().items() if key not in before]
    types = [ge_type for nodes in graph.values() for ge_type in nodes]
    assert types.count("MoeTokenPermute") == 1
    assert types.count("MoeTokenUnpermute") == 1


def test_one_compile_for_many_token_counts() -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, places = npu.npu_moe_token_permute(x, ids)
        y: torch.Tensor = npu.npu_moe_token_unpermute(rows, places, probs)
        return y

    counter = torch._dynamo.testing.CompileCounterWithBackend(moe_graph.npu_backend())
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for tokens in range(3, 12):  # 2 would share the symbol of TOP_K
        x = torch.randn(tokens, HIDDEN, device="npu", requires_grad=True)
        compiled(x, _ids(tokens).npu(), torch.rand(tokens, TOP_K).npu()).sum().backward()
    assert counter.frame_count == 1


def test_an_argument_that_no_op_has_is_an_error() -> None:
    x, ids = torch.randn(3, HIDDEN).npu(), _ids(3).npu()
    with pytest.raises(OpError, match="x_dtype"):
        npu.npu_moe_init_routing_v2(x, ids, expert_num=EXPERTS, x_dtype=1)
    with pytest.raises(OpError, match="padded_mode"):
        npu.npu_moe_token_permute(x, ids, padded_mode=True)


def test_every_form_is_an_operator_of_torch_npu() -> None:
    for name, form in FORMS.items():
        schema = getattr(npu, name).default._schema
        assert callable(form)
        assert schema.name == f"npu::{name}"
