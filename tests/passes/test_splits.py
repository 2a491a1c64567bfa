"""Grouped rows that are split by counts on the host: one grouped body, and no counts there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.capturing import Capture, compile_rewritten, result_and_gradients
from tests.passes.handwritten import EXPERTS, HIDDEN, TOKENS, TOP_K, Routing
from tests.passes.test_loops import LoopMoe

Spelling = Callable[[LoopMoe, Routing], Any]


def _sorted(r: Routing) -> tuple[Tensor, Tensor, list[int]]:
    """Return the order of the rows, their tokens' rows and the counts on the host."""
    order = r.flat.argsort(stable=True)
    counts = functional.one_hot(r.flat, EXPERTS).sum(0).tolist()
    return order, r.x[order // TOP_K], counts


def _sum(r: Routing, order: Tensor, y: Tensor) -> Tensor:
    weighted = y * r.weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(r.x).index_add(0, order // TOP_K, weighted)


def _modules(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    parts = [m.modules_of_experts[e](part) for e, part in enumerate(rows.split(counts))]
    return _sum(r, order, torch.cat(parts))


def _stacked(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    parts = torch.split(rows, counts, dim=0)
    return _sum(r, order, torch.cat([m.stacked(part, e) for e, part in enumerate(parts)], dim=0))


def _two_blocks(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    up = [functional.linear(part, m.w13[e]) for e, part in enumerate(rows.split(counts))]
    gate, up = torch.cat(up).chunk(2, -1)
    hidden = functional.silu(gate) * up
    down = [part @ m.w2[e] for e, part in enumerate(hidden.split(counts))]
    return _sum(r, order, torch.cat(down))


def _put_back(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    y = torch.cat([m.stacked(part, e) for e, part in enumerate(rows.split(counts))])
    slots = torch.empty_like(rows)
    slots[order] = y
    return (slots.view(r.x.shape[0], TOP_K, HIDDEN) * r.weights.unsqueeze(-1)).sum(1)


def _biased_between(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    y = torch.cat([m.stacked(part, e) for e, part in enumerate(rows.split(counts))])
    return _sum(r, order, functional.relu(y) + 1.0)


SPELLINGS: list[Spelling] = [_modules, _stacked, _two_blocks, _put_back, _biased_between]
PRODUCTS = {_modules: 3}


def assert_joined(capture: Capture, spelling: Spelling) -> None:
    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    assert layer.form == "sorted-grouped"
    ops = capture.ops
    assert ops["grouped_matmul_single"] + ops["grouped_matmul"] == PRODUCTS.get(spelling, 2)
    assert ops["moe_init_routing_v2"] == ops["moe_finalize_routing_v2"] == 1
    assert not {"item", "split", "cat", "bincount", "argsort", "sym_sum", "_assert_scalar"} & set(
        ops
    )
    assert ops["linear"] == 1, "only the router is left"


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_splits_join(spelling: Spelling, dynamic: bool) -> None:
    module, x = LoopMoe(spelling), torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module, dynamic=dynamic)
    result, gradients = result_and_gradients(compiled, module, x)

    assert_joined(capture, spelling)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_any_token_count(spelling: Spelling) -> None:
    module = LoopMoe(spelling)
    compiled, capture = compile_rewritten(module, dynamic=True)
    for tokens in (2, 3, 7, 33, 1):
        x = torch.randn(tokens, HIDDEN)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert len(capture.modules) <= 2


def _swapped_counts(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    parts = rows.split([*counts[1:], counts[0]])
    return _sum(r, order, torch.cat([m.stacked(part, e) for e, part in enumerate(parts)]))


def _swapped_results(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    y = [m.stacked(part, e) for e, part in enumerate(rows.split(counts))]
    return _sum(r, order, torch.cat([y[1], y[0], *y[2:]]))


def _counts_of_others(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, _ = _sorted(r)
    other = (r.x[:, :EXPERTS] * 2).topk(TOP_K)[1]
    counts = functional.one_hot(other.reshape(-1), EXPERTS).sum(0).tolist()
    return _sum(r, order, torch.cat([m.stacked(p, e) for e, p in enumerate(rows.split(counts))]))


def _one_expert_differs(m: LoopMoe, r: Routing) -> Tensor:
    order, rows, counts = _sorted(r)
    y = [m.stacked(part * (2 if e == 4 else 1), e) for e, part in enumerate(rows.split(counts))]
    return _sum(r, order, torch.cat(y))


@pytest.mark.parametrize(
    ("spelling", "check"),
    [
        (_swapped_counts, "split-sizes"),
        (_counts_of_others, "split-sizes"),
        (_swapped_results, ""),
        (_one_expert_differs, "equal-experts"),
    ],
)
def test_other_splits_are_kept(spelling: Spelling, check: str) -> None:
    module, x = LoopMoe(spelling), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert capture.after == capture.before
    assert [layer.status for layer in capture.layers] in ([], ["kept"])
    if check:
        assert capture.layers[0].reasons[0].check == check
