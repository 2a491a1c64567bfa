"""Print, per file of public cases, how many pass, how many are not followed, and how many fail."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import pytest
from rich.console import Console
from rich.table import Table

import moe_graph  # noqa: F401  loads the emulation before torch
from tests.vectors.adapters import question_of
from tests.vectors.asking import ask
from tests.vectors.not_followed import NOT_FOLLOWED
from tests.vectors.question import NotAsked
from tests.vectors.reading import FOLDER, cases, files


def outcome(file: str, name: str) -> tuple[str, str]:
    """Return ``("passed" | "not followed" | "failed", why)`` for one case."""
    if reason := NOT_FOLLOWED.get((file, name)):
        return "not followed", reason
    try:
        ask(question_of(file, cases(file)[name]))
    except NotAsked as reason:
        return "not followed", str(reason)
    except (AssertionError, pytest.fail.Exception, ValueError) as failure:
        return "failed", str(failure).strip().split("\n")[0]
    return "passed", ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vectors", description=__doc__)
    parser.add_argument("file", nargs="*", help="names of files; all when none is given")
    parser.add_argument("--why", action="store_true", help="list the cases that do not pass")
    options = parser.parse_args()
    if not files():
        print(f"no vectors in {FOLDER}")
        return 1
    table = Table("file", "cases", "passed", "not followed", "failed", "share", box=None)
    totals: Counter[str] = Counter()
    lines = []
    for file in options.file or files():
        counts: Counter[str] = Counter()
        for name in cases(file):
            kind, why = outcome(file, name)
            counts[kind] += 1
            if kind != "passed":
                lines.append(f"{kind}: {file}: {name}: {why}")
        _add_row(table, file, counts)
        totals += counts
    _add_row(table, "all", totals)
    Console(width=120).print(table)
    if options.why:
        print("\n".join(lines))
    return 1 if totals["failed"] else 0


def _add_row(table: Table, file: str, counts: Counter[str]) -> None:
    total = sum(counts.values())
    share = f"{100 * counts['passed'] / total:.1f} %" if total else "-"
    kinds = [str(counts[kind]) for kind in ("passed", "not followed", "failed")]
    table.add_row(file, str(total), *kinds, share)


if __name__ == "__main__":
    sys.exit(main())
