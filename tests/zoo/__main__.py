"""``python -m tests.zoo [family ...]``: measure families, show and keep the table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from tests.zoo.finding import families
from tests.zoo.measuring import IMPLEMENTATIONS, PARTS, STEPS, Row, measure
from tests.zoo.table import table_of


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("family", nargs="*", help="names of families; default: all")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--experts", choices=IMPLEMENTATIONS, action="append", help="default: all")
    parser.add_argument(
        "--step", choices=STEPS, action="append", help="default: those of the tests"
    )
    parser.add_argument("--save", type=Path, help="JSON file that the rows are added to")
    asked = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = families()
    rows: list[Row] = []
    work = [
        (known[name], part, experts)
        for name in asked.family or known
        for part in asked.part or PARTS
        for experts in (asked.experts or IMPLEMENTATIONS if known[name].switchable else ("",))
    ]
    console = Console(width=None if Console().is_terminal else 200)
    for family, part, experts in track(work, "measuring", console=Console(stderr=True)):
        rows.append(measure(family, part, experts, asked.step))
        if asked.save:
            asked.save.write_text(
                json.dumps([dataclasses.asdict(row) | {"gaps": row.gaps} for row in rows], indent=1)
            )
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
