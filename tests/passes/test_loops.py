"""Loops over experts, in the spellings that people write, fold into one grouped body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.passes.capturing import Capture, compile_rewritten, result_and_gradients
from tests.passes.handwritten import EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, HandwrittenMoe, Routing

Body = Callable[["LoopMoe", Routing], Any]


class Expert(nn.Module):
    """An expert with weights of its own."""

    def __init__(self, inner: int = INNER, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, inner, bias=bias)
        self.gate = nn.Linear(HIDDEN, inner, bias=bias)
        self.down = nn.Linear(inner, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class LoopMoe(HandwrittenMoe):
    """A layer out of one spelling of the loop."""

    def __init__(self, spelling: Body, **expert: Any) -> None:
        super().__init__()
        self.spelling = spelling
        self.modules_of_experts = nn.ModuleList(Expert(**expert) for _ in range(EXPERTS))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))

    def forward(self, x: Tensor) -> Any:
        return self.spelling(self, self.route(x))

    def stacked(self, x: Tensor, expert: int) -> Tensor:
        """Return one expert's rows out of stacked weights."""
        gate, up = functional.linear(x, self.w13[expert]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.w2[expert].t())


def _where(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        out.index_add_(0, token, m.stacked(r.x[token], expert) * r.weights[token, choice, None])
    return out


def _modules(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert, module in enumerate(m.modules_of_experts):
        token, choice = torch.where(r.ids == expert)
        out[token] += module(r.x[token]) * r.weights[token, choice].unsqueeze(-1)
    return out


def _masks(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros(r.x.shape, dtype=r.x.dtype)
    masks = functional.one_hot(r.ids, num_classes=EXPERTS).permute(2, 1, 0)
    for expert, module in enumerate(m.modules_of_experts):
        choice, token = torch.where(masks[expert])
        rows = r.x[None, token].reshape(-1, HIDDEN)
        out.index_add_(0, token, (module(rows) * r.weights[token, choice, None]).to(r.x.dtype))
    return out


def _masks_by_token(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    masks = functional.one_hot(r.ids, EXPERTS)
    for expert in range(EXPERTS):
        places = masks[:, :, expert].nonzero()
        token, choice = places[:, 0], places[:, 1]
        rows = m.stacked(r.x.index_select(0, token), expert)
        out = out.index_add(0, token, rows * r.weights[token, choice][:, None])
    return out


def _any(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert, module in enumerate(m.modules_of_experts):
        mask = r.ids == expert
        chosen = mask.any(-1)
        out[chosen] += module(r.x[chosen]) * r.weights[mask].unsqueeze(-1)
    return out


def _slots(m: LoopMoe, r: Routing) -> Tensor:
    x = r.x.repeat_interleave(TOP_K, dim=0)
    y = torch.empty_like(x)
    for expert, module in enumerate(m.modules_of_experts):
        y[r.flat == expert] = module(x[r.flat == expert])
    return (y.view(*r.weights.shape, -1) * r.weights.unsqueeze(-1)).sum(dim=1)


def _slot_numbers(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    flat_weights = r.weights.reshape(-1)
    for expert in range(EXPERTS):
        (slot,) = torch.where(r.flat == expert)
        token = slot // TOP_K
        out.index_add_(0, token, m.stacked(r.x[token], expert) * flat_weights[slot, None])
    return out


def _unweighted(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, _ = torch.where(r.ids == expert)
        out.index_add_(0, token, m.stacked(r.x[token], expert))
    return out.view(1, -1, HIDDEN).squeeze(0)


def _weights_on_rows(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        out.index_add_(0, token, m.stacked(r.x[token] * r.weights[token, choice, None], expert))
    return out


def _matmul_and_bias(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    w13, bias = m.w13.unbind(0), m.bias.unbind(0)
    for expert in reversed(range(EXPERTS)):
        token, choice = torch.where(r.ids == expert)
        h = functional.linear(r.x[token], w13[expert], bias[expert])
        h = functional.gelu(h[:, :INNER]) * h[:, INNER:]
        out.index_add_(0, token, (h @ m.w2[expert]) * r.weights[token, choice, None])
    return out


def _added_bias(m: LoopMoe, r: Routing) -> Tensor:
    """Products with a vector of each expert added, and gates read by token and expert."""
    gates = r.x.new_zeros(r.x.shape[0], EXPERTS).scatter_(1, r.ids, r.weights)
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, _ = torch.where(r.ids == expert)
        h = r.x[token] @ m.w13[expert].t() + m.bias[expert]
        gate, up = h.chunk(2, -1)
        y = (functional.silu(gate) * up) @ m.w2[expert]
        out.index_add_(0, token, y * gates[token, expert, None])
    return out


SPELLINGS: list[Body] = [
    _where,
    _modules,
    _masks,
    _masks_by_token,
    _any,
    _slots,
    _slot_numbers,
    _unweighted,
    _weights_on_rows,
    _matmul_and_bias,
    _added_bias,
]
spellings = pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)


def compile_folded(module: nn.Module, dynamic: bool = False) -> tuple[Callable[..., Any], Capture]:
    """Return `module` compiled with the passes; ``fullgraph`` captures data-dependent shapes."""
    return compile_rewritten(module, dynamic=dynamic, fullgraph=True)


def assert_folded(capture: Capture, products: int) -> None:
    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    assert layer.form == "expert-loop"
    ops = capture.ops
    assert ops["grouped_matmul_single"] + ops["grouped_matmul"] == products
    assert ops["moe_finalize_routing_v2"] == 1
    left = {"where", "nonzero", "index_add_", "index_add", "setitem", "eq", "one_hot", "any"}
    assert not left & set(ops)
    assert not {"sym_size", "_assert_scalar"} & set(ops)
    assert ops["linear"] == 1, "only the router is left"


def products_of(spelling: Body) -> int:
    return 3 if spelling in (_modules, _masks, _any, _slots) else 2


@spellings
@pytest.mark.parametrize("dynamic", [False, True])
def test_loop_folds(spelling: Body, dynamic: bool) -> None:
    module, x = LoopMoe(spelling), torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_folded(module, dynamic)
    result, gradients = result_and_gradients(compiled, module, x)

    assert_folded(capture, products_of(spelling))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@spellings
def test_any_token_count(spelling: Body) -> None:
    module = LoopMoe(spelling)
    compiled, capture = compile_folded(module, dynamic=True)
    for tokens in (2, 3, 7, 33, 1):
        x = torch.randn(tokens, HIDDEN)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert len(capture.modules) <= 2  # one for any count, and one for a single token


@spellings
def test_bf16(spelling: Body) -> None:
    module = LoopMoe(spelling).to(torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    compiled, capture = compile_folded(module)
    with torch.no_grad():
        result, expected = compiled(x), module(x)
    assert_folded(capture, products_of(spelling))
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6 * expected.abs().max())


def test_expert_without_tokens_has_zero_gradients() -> None:
    module, x = LoopMoe(_modules), torch.rand(TOKENS, HIDDEN)
    with torch.no_grad():
        module.router.weight.copy_(torch.arange(EXPERTS).flip(0)[:, None].expand(-1, HIDDEN))
    compiled, capture = compile_folded(module)
    compiled(x).sum().backward()
    assert_folded(capture, 3)
    for parameter in module.modules_of_experts[EXPERTS - 1].parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert module.modules_of_experts[0].up.weight.grad.any()


def test_biases_of_modules() -> None:
    module, x = LoopMoe(_modules, bias=True), torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_folded(module)
    result, gradients = result_and_gradients(compiled, module, x)
    assert_folded(capture, 3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_weights_of_modules_are_not_copied() -> None:
    module = LoopMoe(_modules)
    compiled, capture = compile_folded(module)
    compiled(torch.randn(TOKENS, HIDDEN))
    assert not {"stack", "cat"} & set(capture.ops)


def _odd_activation(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        h = functional.linear(r.x[token], m.w13[expert])
        act = functional.gelu if expert == 3 else functional.silu
        y = functional.linear(act(h[:, :INNER]), m.w2[expert].t())
        out.index_add_(0, token, y * r.weights[token, choice, None])
    return out


def _scaled_by_number(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        y = m.stacked(r.x[token], expert) * (2.0 + (expert == 2))
        out.index_add_(0, token, y * r.weights[token, choice, None])
    return out


def _one_missing(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS - 1):
        token, choice = torch.where(r.ids == expert)
        out.index_add_(0, token, m.stacked(r.x[token], expert) * r.weights[token, choice, None])
    return out


def _one_twice(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in (*range(EXPERTS), 1):
        token, choice = torch.where(r.ids == expert)
        out.index_add_(0, token, m.stacked(r.x[token], expert) * r.weights[token, choice, None])
    return out


def _other_tokens(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        other, _ = torch.where(r.ids == (expert + 1) % EXPERTS)
        y = m.stacked(r.x[token], expert) * r.weights[token, choice, None]
        out.index_add_(0, other[: token.shape[0]], y[: other.shape[0]])
    return out


def _bias_seen_before(m: LoopMoe, r: Routing) -> Tensor:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        product = r.x[token] @ m.w13[expert].t()
        gate, up = (product + m.bias[expert] + product).chunk(2, -1)
        y = (functional.silu(gate) * up) @ m.w2[expert]
        out.index_add_(0, token, y * r.weights[token, choice, None])
    return out


def _seen_outside(m: LoopMoe, r: Routing) -> Any:
    out = torch.zeros_like(r.x)
    for expert in range(EXPERTS):
        token, choice = torch.where(r.ids == expert)
        y = m.stacked(r.x[token], expert)
        out.index_add_(0, token, y * r.weights[token, choice, None])
    return out, y.sum()


@pytest.mark.parametrize(
    ("spelling", "check", "named"),
    [
        (_odd_activation, "equal-experts", "expert 3: gelu"),
        (_scaled_by_number, "equal-experts", "expert 2: other = 3.0"),
        (_bias_seen_before, "equal-experts", "expert 1: other"),
        (_one_missing, "experts", "experts 0 to 4, 5 in all"),
        (_one_twice, "interior-user", ""),
        (_seen_outside, "interior-user", ""),
    ],
)
def test_loop_with_one_thing_wrong_is_kept(spelling: Body, check: str, named: str) -> None:
    module, x = LoopMoe(spelling), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_folded(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert capture.after == capture.before
    (layer,) = capture.layers
    assert layer.status == "kept"
    assert layer.reasons[0].check == check, str(layer.reasons[0])
    assert named in layer.reasons[0].got


def test_expert_of_another_width_is_named() -> None:
    module = LoopMoe(_modules)
    module.modules_of_experts[4] = Expert(inner=INNER + 1)
    compiled, capture = compile_folded(module)
    x = torch.randn(TOKENS, HIDDEN)
    torch.testing.assert_close(compiled(x), module(x))
    (layer,) = capture.layers
    assert layer.reasons[0].check == "equal-experts"
    assert "expert 4" in layer.reasons[0].got
