"""All experts on all tokens: the chosen ones alone, where gates are proved zero elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graph.config import Config
from tests.passes.capturing import compile_rewritten, result_and_gradients

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 6, 16, 8, 2, 12

Body = Callable[["DenseMoe", Tensor], Tensor]


class DenseMoe(nn.Module):
    """A layer out of one spelling."""

    def __init__(self, spelling: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling = spelling
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, 2 * INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, x)

    def top(self, x: Tensor, k: int = TOP_K) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        values, ids = logits.topk(k, dim=-1)
        return logits, values, ids

    def gates(self, x: Tensor, k: int = TOP_K) -> Tensor:
        logits, values, ids = self.top(x, k)
        return torch.zeros_like(logits).scatter(1, ids, values.softmax(-1))

    def sigmoid_gates(self, x: Tensor) -> Tensor:
        logits, values, ids = self.top(x)
        return torch.full_like(logits, float("-inf")).scatter_(1, ids, values).sigmoid()

    def softmax_gates(self, x: Tensor) -> Tensor:
        logits, values, ids = self.top(x)
        return torch.full_like(logits, float("-inf")).scatter(1, ids, values).softmax(dim=-1)


def _gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _copies(m: DenseMoe, x: Tensor) -> Tensor:
    """Return copies of the tokens, one per expert: [E, T, H]."""
    return x.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN)


def _input_gates(m: DenseMoe, x: Tensor) -> Tensor:
    rows = x.repeat(EXPERTS, 1) * m.sigmoid_gates(x).t().reshape(-1, 1)
    return torch.bmm(_gated(torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.w13)), m.w2).sum(dim=0)


def _output_gates(m: DenseMoe, x: Tensor) -> Tensor:
    y = torch.bmm(_gated(torch.bmm(_copies(m, x), m.w13)), m.w2)
    return (y * m.softmax_gates(x).t().unsqueeze(-1)).sum(0)


def _matmuls(m: DenseMoe, x: Tensor) -> Tensor:
    y = _gated(_copies(m, x) @ m.w13) @ m.w2
    return (y * m.gates(x).transpose(0, 1)[:, :, None]).sum(dim=0)


def _einsums(m: DenseMoe, x: Tensor) -> Tensor:
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    return torch.einsum("te,ted->td", m.gates(x), torch.einsum("tei,eid->ted", h, m.w2))


def _einsums_by_expert(m: DenseMoe, x: Tensor) -> Tensor:
    h = _gated(torch.einsum("edi,td->eti", m.w13, x))
    y = torch.einsum("eti,eid->etd", h, m.w2)
    return torch.einsum("etd,te->td", y, m.softmax_gates(x))


def _weighted_by_token(m: DenseMoe, x: Tensor) -> Tensor:
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    y = torch.einsum("tei,eid->ted", h, m.w2) * m.gates(x).unsqueeze(-1)
    return y.sum(dim=1)


SERVED = [
    _input_gates,
    _output_gates,
    _matmuls,
    _einsums,
    _einsums_by_expert,
    _weighted_by_token,
]


@pytest.mark.parametrize("spelling", SERVED, ids=lambda f: f.__name__)
def test_every_spelling_becomes_the_chosen_experts(spelling: Body) -> None:
    module, x = DenseMoe(spelling), torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module, config=Config(verify=True))
    result, gradients = result_and_gradients(compiled, module, x)
    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    assert layer.form == "dense"
    assert capture.ops["moe_finalize_routing_v2"] == 1
    assert capture.ops["grouped_matmul_single"] == 2
    assert not {"bmm", "matmul", "einsum", "repeat"} & set(capture.ops)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("spelling", SERVED, ids=lambda f: f.__name__)
def test_bf16(spelling: Body) -> None:
    module = DenseMoe(spelling).to(torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    compiled, capture = compile_rewritten(module)
    with torch.no_grad():
        expected, result = module(x), compiled(x)
    assert [layer.status for layer in capture.layers] == ["rewritten"]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6 * expected.abs().max())


@pytest.mark.parametrize("spelling", SERVED, ids=lambda f: f.__name__)
def test_one_graph_for_every_number_of_tokens(spelling: Body) -> None:
    module = DenseMoe(spelling)
    compiled, capture = compile_rewritten(module, dynamic=True)
    for tokens in (2, 3, 5, 7, 12, 31, 64, 1):
        x = torch.randn(tokens, HIDDEN)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert len(capture.modules) == 2  # one token makes a graph of its own
    assert {layer.status for layer in capture.layers} == {"rewritten"}


def _small_gates(m: DenseMoe, x: Tensor) -> Tensor:
    logits, values, ids = m.top(x)
    gates = torch.full_like(logits, -20.0).scatter(1, ids, values).softmax(-1)
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    return torch.einsum("ted,te->td", torch.einsum("tei,eid->ted", h, m.w2), gates)


def _soft(m: DenseMoe, x: Tensor) -> Tensor:
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    y = torch.einsum("tei,eid->ted", h, m.w2)
    return torch.einsum("ted,te->td", y, m.router(x).softmax(-1))


def _biased(m: DenseMoe, x: Tensor) -> Tensor:
    rows = x.repeat(EXPERTS, 1) * m.sigmoid_gates(x).t().reshape(-1, 1)
    h = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.w13) + m.bias
    return torch.bmm(_gated(h), m.w2).sum(dim=0)


def _one_added(m: DenseMoe, x: Tensor) -> Tensor:
    rows = x.repeat(EXPERTS, 1) * m.sigmoid_gates(x).t().reshape(-1, 1)
    h = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.w13)
    return torch.bmm(_gated(h + 1), m.w2).sum(dim=0)


def _cosine(m: DenseMoe, x: Tensor) -> Tensor:
    rows = x.repeat(EXPERTS, 1) * m.sigmoid_gates(x).t().reshape(-1, 1)
    h = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.w13)
    return torch.bmm(_gated(h.cos()), m.w2).sum(dim=0)


def _gates_of_the_next_token(m: DenseMoe, x: Tensor) -> Tensor:
    gates = m.softmax_gates(x.roll(1, 0))
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    return torch.einsum("ted,te->td", torch.einsum("tei,eid->ted", h, m.w2), gates.roll(1, 0))


def _wrong_order(m: DenseMoe, x: Tensor) -> Tensor:
    rows = x.repeat(EXPERTS, 1) * m.sigmoid_gates(x).reshape(-1, 1)  # by token, not by expert
    return torch.bmm(_gated(torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.w13)), m.w2).sum(0)


def _sum_over_tokens(m: DenseMoe, x: Tensor) -> Tensor:
    y = torch.bmm(_gated(torch.bmm(_copies(m, x), m.w13)), m.w2)
    return (y * m.softmax_gates(x).t().unsqueeze(-1)).sum(1)


def _also_returned(m: DenseMoe, x: Tensor) -> Tensor:
    y = torch.bmm(_gated(torch.bmm(_copies(m, x), m.w13)), m.w2)
    return (y * m.softmax_gates(x).t().unsqueeze(-1)).sum(0) + y[0]


def _all_experts(m: DenseMoe, x: Tensor) -> Tensor:
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    y = torch.einsum("tei,eid->ted", h, m.w2)
    return torch.einsum("ted,te->td", y, m.gates(x, EXPERTS))


def _written_gates(m: DenseMoe, x: Tensor) -> Tensor:
    gates = m.gates(x)
    gates.add_(0.5)
    h = _gated(torch.einsum("td,edi->tei", x, m.w13))
    return torch.einsum("ted,te->td", torch.einsum("tei,eid->ted", h, m.w2), gates)


@pytest.mark.parametrize(
    ("spelling", "check"),
    [
        (_small_gates, "dense-gate"),
        (_soft, None),
        (_biased, "form"),
        (_one_added, "form"),
        (_cosine, "form"),
        (_gates_of_the_next_token, "dense-gate"),
        (_wrong_order, "form"),
        (_sum_over_tokens, None),
        (_also_returned, "interior-user"),
        (_all_experts, "dense-cost"),
        (_written_gates, "dense-gate"),
    ],
)
def test_what_is_not_proved_stays(spelling: Body, check: str | None) -> None:
    module, x = DenseMoe(spelling), torch.randn(EXPERTS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert capture.after == capture.before
    reasons = [reason.check for layer in capture.layers for reason in layer.reasons]
    assert reasons == ([check] if check else [])
