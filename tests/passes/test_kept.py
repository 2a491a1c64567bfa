"""A layer with one thing wrong is kept as it came, and the report names the check that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graph.report import LayerReport
from tests.passes.capturing import compile_rewritten
from tests.passes.families import FAMILIES
from tests.passes.families import HIDDEN as FAMILY_HIDDEN
from tests.passes.handwritten import (
    DISPATCHES,
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOP_K,
    HandwrittenMoe,
    Routing,
)


def kept_layer(module: nn.Module, *args: Tensor) -> LayerReport:
    """Compile, check that the graph and its results are as before, return the one report."""
    args = args or (torch.randn(TOKENS, HIDDEN),)
    compiled, capture = compile_rewritten(module)
    results, expected = compiled(*args), module(*args)

    torch.testing.assert_close(results, expected)
    assert capture.after == capture.before
    (layer,) = capture.layers
    assert layer.status == "kept"
    return layer


def _counts_of_other_ids(r: Routing) -> Tensor:
    other = (r.x[:, :EXPERTS] * 2).topk(TOP_K)[1]
    return torch.histc(other.reshape(-1).float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def _other_permutation(r: Routing, y: Tensor) -> Tensor:
    weighted = y * r.weights.view(-1)[r.order].unsqueeze(-1)
    other = torch.sort((EXPERTS - 1 - r.ids).reshape(-1))[1]
    return weighted[torch.argsort(other)].view(TOKENS, TOP_K, HIDDEN).sum(1)


def _second_unstable_sort(r: Routing, y: Tensor) -> Tensor:
    weighted = y * r.weights.view(-1)[r.order].unsqueeze(-1)
    inverse = torch.argsort(torch.sort(r.flat)[1])
    return weighted[inverse].view(TOKENS, TOP_K, HIDDEN).sum(1)


def _weights_in_slot_order(r: Routing, y: Tensor) -> Tensor:
    weighted = y * r.weights.view(-1, 1)
    return weighted[torch.argsort(r.order)].view(TOKENS, TOP_K, HIDDEN).sum(1)


def _seen_through_a_view(r: Routing, y: Tensor) -> Tensor:
    weighted = y * r.weights.view(-1)[r.order].unsqueeze(-1)
    out = r.x * 2
    seen = out.view(-1)
    out.index_add_(0, r.order // TOP_K, weighted)
    return seen.view(TOKENS, HIDDEN)


def _mutated_weights(r: Routing, y: Tensor) -> Tensor:
    sorted_weights = r.weights.view(-1)[r.order].unsqueeze(-1)
    r.weights.mul_(2.0)
    weighted = y * sorted_weights
    return weighted[torch.argsort(r.order)].view(TOKENS, TOP_K, HIDDEN).sum(1)


def _mean_over_experts_rows(module: Any, r: Routing, rows: Tensor) -> Tensor:
    y = module.experts(r, rows)
    return y - y.mean(0, keepdim=True)


def _dropout(module: Any, r: Routing, rows: Tensor) -> Tensor:
    return functional.dropout(module.experts(r, rows), 1.0, training=True)


def _inclusive_histogram(r: Routing) -> Tensor:
    return torch.histc(r.flat.float(), bins=EXPERTS, min=0, max=EXPERTS + 3)


def _one_bin_more(r: Routing) -> Tensor:
    return torch.histc(r.flat.float(), bins=EXPERTS + 1, min=0, max=EXPERTS)[:EXPERTS]


BROKEN: list[tuple[str, dict[str, Callable[..., Any]]]] = [
    ("divisor", {"dispatch": lambda r: r.x[r.order // (TOP_K + 1)]}),
    ("divisor", {"dispatch": lambda r: r.x[r.order // 1 % TOKENS]}),
    ("histogram-range", {"counts": _inclusive_histogram}),
    ("group-ends", {"counts": _one_bin_more}),
    ("one-root", {"counts": _counts_of_other_ids}),
    ("one-permutation", {"combine": _second_unstable_sort}),
    ("row-operand", {"combine": _weights_in_slot_order}),
    ("in-place-write", {"combine": _seen_through_a_view}),
    ("in-place-write", {"combine": _mutated_weights}),
    ("random-in-experts", {"body": _dropout}),
    ("sort-direction", {"sort": lambda r: r.flat.sort(descending=True)}),
]


@pytest.mark.parametrize(
    ("check", "pieces"), BROKEN, ids=[f"{i}-{check}" for i, (check, _) in enumerate(BROKEN)]
)
def test_broken_layer_is_kept_with_the_check_named(check: str, pieces: dict[str, Any]) -> None:
    layer = kept_layer(HandwrittenMoe(**pieces))

    assert layer.reasons[0].check == check, str(layer.reasons[0])
    assert layer.reasons[0].got
    assert layer.reasons[0].want
    assert layer.reasons[0].source.rpartition("/")[2].startswith("test_kept.py:") or (
        "handwritten.py:" in layer.reasons[0].source
    )


def test_permutation_of_other_keys_is_kept() -> None:
    layer = kept_layer(HandwrittenMoe(combine=_other_permutation))
    assert layer.reasons


def test_ids_from_outside_the_graph_are_kept() -> None:
    class Experts(HandwrittenMoe):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            self.route = lambda _: Routing(x, weights, ids)
            return super().forward(x)

    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    layer = kept_layer(Experts(), torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K), ids)
    assert layer.reasons[0].check == "expert-ids-bound"
    assert layer.reasons[0].hint


def test_more_experts_in_the_router_than_in_the_weights_are_kept() -> None:
    module = HandwrittenMoe()
    module.router = nn.Linear(HIDDEN, EXPERTS + 2, bias=False)
    with torch.no_grad():
        module.router.weight[EXPERTS:] = 0
    x = torch.rand(TOKENS, HIDDEN)
    with torch.no_grad():
        module.router.weight[:EXPERTS] = module.router.weight[:EXPERTS].abs() + 1
    layer = kept_layer(module, x)
    assert layer.reasons[0].check == "experts"


def test_other_use_of_the_order_of_an_unstable_sort_is_kept() -> None:
    class Leaking(HandwrittenMoe):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            routing = self.route(x)
            routing.sorted_ids, routing.order = self.sort(routing)
            routing.ends = torch.cumsum(self.counts(routing), 0).to(torch.int32)
            y = self.experts(routing, self.dispatch(routing))
            return self.combine(routing, y), routing.order

    layer = kept_layer(Leaking())
    assert layer.reasons[0].check == "interior-user"


def test_other_use_of_the_order_of_a_stable_sort_is_served() -> None:
    class Leaking(HandwrittenMoe):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            routing = self.route(x)
            routing.sorted_ids, routing.order = torch.sort(routing.flat, stable=True)
            routing.ends = torch.cumsum(self.counts(routing), 0).to(torch.int32)
            y = self.experts(routing, self.dispatch(routing))
            return self.combine(routing, y), y

    module, x = Leaking(), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    for result, expected in zip(compiled(x), module(x), strict=True):
        torch.testing.assert_close(result, expected)
    assert [layer.status for layer in capture.layers] == ["rewritten"]


def test_counts_used_elsewhere_still_hold() -> None:
    class WithLoads(HandwrittenMoe):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            routing = self.route(x)
            routing.sorted_ids, routing.order = self.sort(routing)
            counts = self.counts(routing)
            routing.ends = torch.cumsum(counts, 0).to(torch.int32)
            y = self.experts(routing, self.dispatch(routing))
            return self.combine(routing, y), counts / counts.sum()

    module, x = WithLoads(), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    for result, expected in zip(compiled(x), module(x), strict=True):
        torch.testing.assert_close(result, expected)
    assert [layer.status for layer in capture.layers] == ["rewritten"]


def test_gradient_switched_off_for_the_dispatch_is_kept() -> None:
    def without_gradient(r: Routing) -> Tensor:
        with torch.no_grad():
            return DISPATCHES["floordiv"](r)

    layer = kept_layer(HandwrittenMoe(dispatch=without_gradient))
    assert layer.reasons[0].check == "grad-mode"


def test_no_gradient_through_detached_rows() -> None:
    module = HandwrittenMoe(dispatch=lambda r: DISPATCHES["floordiv"](r).detach())
    layer = kept_layer(module)
    assert layer.reasons


def test_mean_over_rows_is_kept() -> None:
    layer = kept_layer(HandwrittenMoe(body=_mean_over_experts_rows))
    assert layer.reasons[0].check == "interior-user"


def test_unsupported_dtype_is_kept_with_the_limit_of_the_op() -> None:
    module = HandwrittenMoe().double()
    layer = kept_layer(module, torch.randn(TOKENS, HIDDEN, dtype=torch.float64))
    assert layer.reasons[0].check == "op-limits"
    assert "MoeInitRoutingV2" in layer.reasons[0].got


def test_reasons_are_not_formatted_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_graph.passes import misses

    def fail(*_: Any) -> str:
        raise AssertionError("text made for a graph without layers")

    monkeypatch.setattr(misses, "_text", fail)
    compiled, capture = compile_rewritten(lambda x: x[torch.sort(x[:, 0])[1] // 3])
    compiled(torch.randn(6, 2))
    assert capture.layers == []


def test_rows_written_before_the_combine_are_kept() -> None:
    def combine(r: Routing, y: Tensor) -> Tensor:
        weighted = y * r.weights.view(-1)[r.order].unsqueeze(-1)
        y.zero_()
        return weighted[torch.argsort(r.order)].view(TOKENS, TOP_K, HIDDEN).sum(1)

    layer = kept_layer(HandwrittenMoe(combine=combine))
    assert layer.reasons[0].check == "in-place-write"


def _twice(r: Routing, y: Tensor) -> Tensor:
    slots = y[torch.argsort(r.order)].view(TOKENS, TOP_K, HIDDEN)
    return slots.sum(1) + (slots * r.weights.unsqueeze(-1)).sum(1)


def test_rows_combined_twice_are_kept() -> None:
    module, x = HandwrittenMoe(combine=_twice), torch.randn(TOKENS, HIDDEN)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert capture.after == capture.before
    assert {layer.reasons[0].check for layer in capture.layers} == {"interior-user"}


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss"])
def test_expert_parallel_sentinel_is_kept(model: str) -> None:
    block = next(family for family in FAMILIES if family.model == model).build().eval()
    block.experts._is_expert_parallel = True
    compiled, capture = compile_rewritten(block)
    x = torch.randn(2, 9, FAMILY_HIDDEN)
    result, expected = compiled(x), block(x)
    if isinstance(result, tuple):
        result, expected = result[0], expected[0]
    torch.testing.assert_close(result, expected)
    (layer,) = capture.layers
    assert layer.status == "kept"
    assert layer.path == "experts"
    assert layer.reasons[0].check == "expert-parallel-sentinel"
