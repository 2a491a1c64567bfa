"""Graphs drift, layers stay: rewritten to equal values, or kept with a reason, never wrong."""

from __future__ import annotations

import copy
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

MAY_BE_KEPT = 0.45
"""Share of the mutants of a layer that is rewritten as it is."""

PLACES = 4
"""Places at which one change is tried on each layer."""

ROUTERS = (
    "a router fails where the size of its weights is read, or where their sum is read elsewhere "
    "and the division in place stays"
)


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
        outcomes: of the mutants of layers that are rewritten as they are.
        broken: mutants of any layer that the passes made fail or compute something else.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
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
                drift.outcomes[outcome(reports)] += 1
    return drift


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=ROUTERS)
def test_no_mutant_is_broken(drift: Drift) -> None:
    assert not drift.broken


def test_most_mutants_are_rewritten(drift: Drift) -> None:
    assert drift.outcomes.total() >= 200
    share = drift.outcomes["rewritten"] / drift.outcomes.total()
    assert share >= 1 - MAY_BE_KEPT, drift.outcomes


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="ids behind one more no-op leave no trace"
)
def test_no_mutant_is_passed_over_in_silence(drift: Drift) -> None:
    assert drift.outcomes["silent"] == 0


NO_OP = "no-ops other than [:], casts, clone and contiguous hide what they pass on"
READER = "who reads only a size, or is never read, counts as a reader of the order of the rows"

GAPS = {
    "view": NO_OP,
    "+ 0": NO_OP,
    "* 1": NO_OP,
    "dropout 0": NO_OP,
    "unsqueeze squeeze": NO_OP,
    "transpose transpose": NO_OP,
    "reader": READER,
    "returned size": READER,
}
"""Change -> why a layer in the sorted form may be kept after it."""

LEGITIMATE = {"returned detached": {"interior-user"}, "returned flat": {"interior-user"}}
"""Change -> checks that it rightly fails: the order of an unstable sort is nobody else's."""


@pytest.fixture(scope="module")
def sorted_layers() -> list[Layer]:
    return [layer for layer in layers(False) if layer.kind == "sorted"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(strict=True, raises=AssertionError, reason=GAPS[name])]
            if name in GAPS
            else [],
        )
        for name in CHANGES
    ],
)
def test_one_change_keeps_no_layer_in_the_sorted_form(
    change: str, sorted_layers: list[Layer]
) -> None:
    outcomes: Counter[str] = Counter()
    for number, layer in enumerate(sorted_layers):
        for seed in range(number * PLACES, (number + 1) * PLACES):
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
    assert outcomes.total() >= 2 * len(sorted_layers)
    assert set(outcomes) - LEGITIMATE.get(change, set()) == {"rewritten"}, outcomes


def test_checkpointing_keeps_no_layer_in_the_sorted_form(sorted_layers: list[Layer]) -> None:
    for layer in sorted_layers:
        reports = passed(layer, "checkpoint", checkpointed(layer.gm))
        assert reports is not None
        assert outcome(reports) == "rewritten"
