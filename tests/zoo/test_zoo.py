"""Every MoE family compiles as ``gaps.json`` says, which lists what is not perfect yet, and why.

Perfect is: one graph, every layer rewritten, outputs within 1e-5 and gradients within 1e-4 of the
eager model, two graphs for forty token counts. A family that is not in the file has to be perfect,
and one that is in it as imperfect as it says: a gap that is closed has to leave the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.finding import UNDECORATED, families
from tests.zoo.measuring import IMPLEMENTATIONS, PARTS, measure

_GAPS: dict[str, Any] = json.loads((Path(__file__).parent / "gaps.json").read_text())


@dataclass(frozen=True)
class Expected:
    """What is known to be less than perfect.

    Attributes:
        why: what stands in the way.
        graphs: of one forward.
        missed: layers that are not rewritten.
        compiles: for forty token counts.
        checks: checks that kept layers fail.
    """

    why: str = ""
    graphs: int = 1
    missed: int = 0
    compiles: int = 2
    checks: list[str] = field(default_factory=list)


def expected(name: str, part: str) -> Expected:
    return Expected(**_GAPS.get(f"{name}/{part}", {}))


def _cases() -> list[Any]:
    return [
        pytest.param(name, part, experts, id=f"{name}-{part}-{experts or 'own'}")
        for name, family in families().items()
        for part in PARTS
        for experts in (IMPLEMENTATIONS if family.switchable else ("",))
    ]


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "part", "experts"), _cases())
def test_family(name: str, part: str, experts: str) -> None:
    row = measure(families()[name], part, experts)
    known = expected(name, part)
    assert not row.failures
    assert row.graphs == known.graphs
    assert row.layers - row.rewritten == known.missed
    assert sorted(row.kept) == sorted(known.checks)
    assert row.error is not None
    assert row.error <= 1e-5
    assert row.gradient_error is not None
    assert row.gradient_error <= 1e-4
    assert row.compiles in (None, known.compiles)


def test_every_family_with_experts_is_found() -> None:
    found = families()
    assert len(found) - len(UNDECORATED) >= 68
    assert {family.experts for family in found.values()} >= set(UNDECORATED.values())
    models = [family.model for family in found.values()]
    assert len(set(models)) == len(models)


def test_gaps_are_of_families_that_exist_and_say_why() -> None:
    assert set(_GAPS) <= {f"{name}/{part}" for name in families() for part in PARTS}
    assert all(Expected(**gap).why for gap in _GAPS.values())
