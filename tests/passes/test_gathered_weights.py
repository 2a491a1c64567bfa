"""Layers that gather the weights of every slot: the same fused ops as for a sorted layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.passes.capturing import compile_rewritten, result_and_gradients
from tests.passes.handwritten import EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, HandwrittenMoe, Routing

Body = Callable[["GatheredMoe", Routing], Tensor]


class GatheredMoe(HandwrittenMoe):
    """A layer out of one spelling of the experts, which yields the sum over the experts."""

    def __init__(self, spelling: Body) -> None:
        super().__init__()
        self.spelling = spelling
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, self.route(x))


def _gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return functional.silu(gate) * up


def _columns(m: GatheredMoe, r: Routing) -> Tensor:
    rows = r.x.repeat_interleave(TOP_K, dim=0)
    h = torch.bmm(m.w13[r.flat], rows.unsqueeze(-1)).squeeze(-1)
    y = torch.bmm(_gated(h).unsqueeze(1), m.w2[r.flat]).squeeze(1)
    return (y * r.weights.view(-1, 1)).view(r.x.shape[0], TOP_K, HIDDEN).sum(1)


def _token_numbers(m: GatheredMoe, r: Routing) -> Tensor:
    rows = r.x[torch.arange(r.x.shape[0]).repeat_interleave(TOP_K)]
    h = torch.bmm(rows.unsqueeze(1), m.w13[r.flat].transpose(1, 2)).squeeze(1)
    y = torch.bmm(_gated(h).unsqueeze(1), m.w2[r.flat]).squeeze(1)
    return torch.einsum("tkh,tk->th", y.view(r.x.shape[0], TOP_K, HIDDEN), r.weights)


def _einsum(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids])
    y = torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids])
    return torch.einsum("tki,tk->ti", y, r.weights)


def _matmul(m: GatheredMoe, r: Routing) -> Tensor:
    h = (m.w13[r.ids] @ r.x[:, None, :, None]).squeeze(-1)
    y = (_gated(h).unsqueeze(-2) @ m.w2[r.ids]).squeeze(-2)
    return (y * r.weights.unsqueeze(-1)).sum(dim=1)


def _expanded(m: GatheredMoe, r: Routing) -> Tensor:
    rows = r.x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN)
    w13, w2 = m.w13.index_select(0, r.flat), m.w2.index_select(0, r.flat)
    h = torch.bmm(w13, rows.unsqueeze(2)).squeeze(2)
    y = torch.einsum("si,sih->sh", _gated(h), w2).view(r.x.shape[0], TOP_K, HIDDEN)
    return torch.bmm(r.weights.unsqueeze(1), y).squeeze(1)


def _bias(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids]) + m.bias[r.ids]
    y = torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids])
    return (y * r.weights.unsqueeze(-1)).sum(1)


def _weights_inside(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids]) * r.weights.unsqueeze(-1)
    y = torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids])
    return y.sum(1)


def _scaled_by_expert(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids])
    h = _gated(h) * torch.sigmoid(m.bias[r.ids][..., :INNER])
    y = torch.einsum("tko,tkoi->tki", h, m.w2[r.ids])
    return (y * r.weights.unsqueeze(-1)).sum(1)


SPELLINGS: list[Body] = [
    _columns,
    _token_numbers,
    _einsum,
    _matmul,
    _expanded,
    _bias,
    _weights_inside,
    _scaled_by_expert,
]
spellings = pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)


@spellings
@pytest.mark.parametrize("dynamic", [False, True])
def test_layer_is_rewritten(spelling: Body, dynamic: bool) -> None:
    module, x = GatheredMoe(spelling), torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module, dynamic=dynamic)
    result, gradients = result_and_gradients(compiled, module, x)

    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    assert layer.form == "gathered-weights"
    ops = capture.ops
    assert ops["grouped_matmul_single"] == 2
    assert ops["moe_finalize_routing_v2"] == 1
    assert not {"bmm", "einsum", "matmul", "index_select"} & set(ops)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@spellings
def test_any_token_count(spelling: Body) -> None:
    module = GatheredMoe(spelling)
    compiled, capture = compile_rewritten(module, dynamic=True)
    for tokens in (2, 3, 7, 33, 1, 0):
        x = torch.randn(tokens, HIDDEN)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert len(capture.modules) <= 3  # one for any count, and those for 0 and 1


def _per_k_scale(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids]) * m.bias[:TOP_K]
    return torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids]).sum(1)


def _mixed_slots(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids]).cumsum(1)
    return torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids]).sum(1)


def _other_ids(m: GatheredMoe, r: Routing) -> Tensor:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids])
    other = (r.x * 2)[:, :EXPERTS].topk(TOP_K)[1]
    return torch.einsum("tko,tkoi->tki", _gated(h), m.w2[other]).sum(1)


def _seen_outside(m: GatheredMoe, r: Routing) -> Any:
    h = torch.einsum("ti,tkoi->tko", r.x, m.w13[r.ids])
    return torch.einsum("tko,tkoi->tki", _gated(h), m.w2[r.ids]).sum(1), h


def _flipped_tokens(m: GatheredMoe, r: Routing) -> Tensor:
    rows = r.x.flip(0).repeat_interleave(TOP_K - 1, dim=0)[: r.flat.shape[0]]
    h = torch.bmm(m.w13[r.flat][: rows.shape[0]], rows.unsqueeze(-1)).squeeze(-1)
    y = torch.bmm(_gated(h).unsqueeze(1), m.w2[r.flat][: rows.shape[0]]).squeeze(1)
    return y.sum(0)


@pytest.mark.parametrize(
    ("spelling", "check"),
    [
        (_per_k_scale, "row-operand"),
        (_mixed_slots, "row-wise"),
        (_other_ids, "form"),
        (_seen_outside, "interior-user"),
        (_flipped_tokens, ""),
    ],
)
def test_what_depends_on_the_slot_is_kept(spelling: Any, check: str) -> None:
    module, x = GatheredMoe(spelling), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert capture.after == capture.before
    assert {layer.status for layer in capture.layers} <= {"kept"}
    if check:
        assert capture.layers[0].reasons[0].check == check
