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
from tests.passes.drift import CHANGES, NO_OPS, checkpointed, mutants
from tests.passes.drift_layers import Layer, layers, results

OF_SERVED, OF_OTHERS = 16, 3
"""Mutants of a layer that is rewritten as it is, and of one that is kept."""

MAY_BE_KEPT = {"sorted": 0.2, "gathered": 0.2, "loop": 0.4}
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


def test_no_mutant_is_passed_over_in_silence(drift: Drift) -> None:
    assert not any(outcomes["silent"] for outcomes in drift.outcomes.values())


SHOWN = {"interior-user", "in-place-write"}
"""Checks that a layer rightly fails when the order of its rows, or half a sum, is returned."""

STRIDED = {"combine", "combine-weights", "experts", "row-operand"}
"""Checks that a layer may fail behind a copy of every other element, or of what is written later:
the strides, or the moment, are then other ones, and the copy stays."""

MAY_FAIL: dict[str, set[str]] = {
    **dict.fromkeys(NO_OPS, STRIDED),
    **dict.fromkeys(("returned size", "returned detached", "returned flat"), SHOWN),
}
"""Change -> checks that a layer may fail after it."""


@pytest.fixture(scope="module")
def served_layers() -> list[Layer]:
    return [layer for layer in layers(False) if is_served(layer)]


@pytest.mark.parametrize(("kind", "change"), itertools.product(PLACES, CHANGES))
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
    assert set(outcomes) - MAY_FAIL.get(change, set()) == {"rewritten"}, outcomes
    if MAY_FAIL.get(change) is not SHOWN:
        assert outcomes["rewritten"] >= 0.9 * outcomes.total(), outcomes


def test_checkpointing_keeps_no_layer(served_layers: list[Layer]) -> None:
    for layer in served_layers:
        reports = passed(layer, "checkpoint", checkpointed(layer.gm))
        if reports is None:
            # What is written in place cannot be computed again.
            assert layer.name.startswith("Torchtitan")
        else:
            assert outcome(reports) == "rewritten", layer.name
