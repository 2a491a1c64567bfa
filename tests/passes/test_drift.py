"""Graphs drift, layers stay: rewritten to equal values, or kept with a reason, never wrong."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from moe_graph.report import LayerReport
from tests.passes.drift import CHANGES, checkpointed, mutants
from tests.passes.drift_layers import Layer, layers, results

OF_SERVED, OF_OTHERS = 16, 3
"""Mutants of a layer that is rewritten as it is, and of one that is kept."""

MAY_BE_KEPT = {"sorted": 0.45, "gathered": 0.45, "loop": 0.92}
"""Kind of layer -> share of the mutants of layers that are rewritten as they are."""

PLACES = {"sorted": 4, "gathered": 8, "loop": 8}
"""Kind of layer -> places at which one change is tried on each."""


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """Makes a graph that reads memory which nothing wrote give NaN, always."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_equal(got: list[Any], want: list[Any], what: str, tolerance: float) -> None:
    assert len(got) == len(want)
    for left, right in zip(got, want, strict=True):
        if not isinstance(right, Tensor):
            assert left == right, what
            continue
        scale = right.detach().float().nan_to_num().abs().max().item() if right.numel() else 0.0
        torch.testing.assert_close(
            left,
            right,
            rtol=tolerance,
            atol=tolerance * max(scale, 1.0),
            equal_nan=True,  # memory that nothing has written may be returned
            msg=lambda m: f"{what}\n{m}",
        )


def passed(layer: Layer, what: str, mutant: GraphModule) -> list[LayerReport] | None:
    """Run the passes on a mutant, check that they change no result, and return their reports.

    None where the change was none that leaves the values alone: what it copied is written later.
    """
    unchanged, _ = results(layer, layer.gm)
    try:
        expected, expected_gradients = results(layer, mutant)
    except RuntimeError:
        return None  # autograd refuses a view of what is written
    if not torch.equal(expected[0], unchanged[0]):
        return None
    before = _printed(mutant)
    reports = rewrite_moe_layers(mutant, Config())
    assert _printed(mutant) == before or any(r.status == "rewritten" for r in reports), what
    got, gradients = results(layer, mutant)
    assert_equal(got, expected, f"{layer.name}: {what}", 1e-5)
    assert_equal(gradients, expected_gradients, f"{layer.name}, gradient: {what}", 1e-4)
    return reports


def _printed(gm: GraphModule) -> list[str]:
    return [
        node.format_node() or node.name
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    ]


def is_served(layer: Layer) -> bool:
    reports = rewrite_moe_layers(copy.deepcopy(layer.gm), Config())
    return bool(reports) and all(report.status == "rewritten" for report in reports)


def outcome(reports: list[LayerReport]) -> str:
    """Return ``rewritten``, the checks that failed, or ``silent`` where nothing is said."""
    checks = [reason.check for report in reports for reason in report.reasons]
    if checks:
        return ", ".join(checks)
    return "rewritten" if reports else "silent"


@dataclass
class Drift:
    """What became of many mutants.

    Attributes:
        outcomes: kind of layer -> outcomes for the layers that are rewritten as they are.
        broken: mutants of any layer that the passes made fail or compute something else.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def drift(request: pytest.FixtureRequest) -> Drift:
    drift = Drift()
    for seed, layer in enumerate(layers(dynamic=request.param)):
        served = is_served(layer)
        for what, mutant in mutants(layer.gm, OF_SERVED if served else OF_OTHERS, seed):
            try:
                reports = passed(layer, what, mutant)
            except Exception as error:
                drift.broken.append(f"{layer.name}: {what}: {type(error).__name__} {error}"[:400])
                continue
            if reports is not None and served:
                drift.outcomes.setdefault(layer.kind, Counter())[outcome(reports)] += 1
    return drift


def test_no_mutant_is_broken(drift: Drift) -> None:
    assert not drift.broken


@pytest.mark.parametrize("kind", MAY_BE_KEPT)
def test_most_mutants_are_rewritten(kind: str, drift: Drift) -> None:
    assert sum(outcomes.total() for outcomes in drift.outcomes.values()) >= 200
    outcomes = drift.outcomes[kind]
    assert outcomes["rewritten"] >= (1 - MAY_BE_KEPT[kind]) * outcomes.total(), outcomes


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="ids behind one more no-op leave no trace"
)
def test_no_mutant_is_passed_over_in_silence(drift: Drift) -> None:
    assert not any(outcomes["silent"] for outcomes in drift.outcomes.values())


NO_OP = "a no-op hides what it passes on"
READER = "who reads only a size, or is never read, counts as a reader of the order of the rows"
OPAQUE = ["view", "+ 0", "* 1", "dropout 0", "unsqueeze squeeze", "transpose transpose"]

GAPS: dict[tuple[str, str], str] = {
    **{(kind, change): NO_OP for kind in PLACES for change in OPAQUE},
    ("gathered", "cast"): NO_OP,
    **{("loop", change): NO_OP for change in ("[:]", "[...]", "contiguous", "clone", "cast")},
    **{(kind, change): READER for kind in PLACES for change in ("reader", "returned size")},
}
"""(Kind, change) -> why a layer may be kept after it."""

LEGITIMATE = {"returned detached": {"interior-user"}, "returned flat": {"interior-user"}}
"""Change -> checks that it rightly fails: an order that is the layer's own is not shown."""


@pytest.fixture(scope="module")
def served_layers() -> list[Layer]:
    return [layer for layer in layers(False) if is_served(layer)]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.xfail(strict=True, raises=AssertionError, reason=GAPS[case])]
            if case in GAPS
            else [],
        )
        for case in itertools.product(PLACES, CHANGES)
    ],
)
def test_one_change_keeps_no_layer(kind: str, change: str, served_layers: list[Layer]) -> None:
    outcomes: Counter[str] = Counter()
    places = PLACES[kind]
    for number, layer in enumerate(served_layers):
        if layer.kind != kind:
            continue
        for seed in range(number * places, (number + 1) * places):
            mutant = copy.deepcopy(layer.gm)
            where = CHANGES[change](random.Random(seed), mutant)
            if where is None:
                continue
            mutant.recompile()
            try:
                reports = passed(layer, f"{change} at {where}", mutant)
            except Exception as error:
                outcomes[f"broken, {layer.name} at {where}: {error}"[:400]] += 1
                continue
            if reports is not None:
                outcomes[outcome(reports)] += 1
    assert outcomes.total() >= 10
    assert set(outcomes) - LEGITIMATE.get(change, set()) == {"rewritten"}, outcomes


def test_checkpointing_keeps_no_layer(served_layers: list[Layer]) -> None:
    for layer in served_layers:
        reports = passed(layer, "checkpoint", checkpointed(layer.gm))
        assert reports is not None
        assert outcome(reports) == "rewritten", layer.name
