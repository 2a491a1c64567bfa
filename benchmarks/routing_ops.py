"""The eager ops against the best composition of PyTorch ops for the same result, in one thread.

Prints, per op and shape, the median time and two ratios (above 1: ours is faster): against the
fastest peer with the same bits, and against the fastest one that sums in any order. The last column
is the memory beside inputs and outputs, per (token, expert) pair. Ratios come from one run.
Writes ``benchmarks/results/routing_ops.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moe_graph  # noqa: F401  first: loads the emulated Ascend stack where no CANN is installed

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peak_memory import peak_bytes
from benchmarks.routing_cases import CASES, TOP_K, Case

TOKENS, HIDDEN = (1, 256, 4096, 65536), (512, 7168)
RESULTS = Path(__file__).parent / "results" / "routing_ops.json"
PROFILED_TOKENS = 4096
"""Up to this size memory is measured: the profiler keeps every allocation of a call."""


@dataclass
class Figures:
    """What was measured of one op at one shape; times in microseconds.

    Attributes:
        same_bits_us: the fastest peer whose results are equal to ours bit for bit.
        any_peer_us: the fastest peer, whatever order it sums in.
    """

    op: str
    tokens: int
    hidden: int
    ours_us: float
    same_bits_us: float | None
    any_peer_us: float
    extra_bytes_per_pair: float | None


def measure(name: str, case: Case, tokens: int, hidden: int, seconds: float) -> Figures:
    """Time a case, ours and the peers in turns, after a check that their results agree."""
    same_bits = [_equal(name, case.ours(), peer()) for peer in case.peers]
    calls = [case.ours, *case.peers]
    rounds, inner = _repeats(case.ours, seconds)
    times: list[list[float]] = [[] for _ in calls]
    pairs = list(zip(calls, times, strict=True))
    for number in range(rounds):
        # Each begins in turn: a call pays for memory that the one before it gave back.
        first = number % len(pairs)
        for call, own in pairs[first:] + pairs[:first]:
            own.append(_microseconds(call, inner))
    ours, *peers = [statistics.median(own) for own in times]
    extra = None
    if tokens <= PROFILED_TOKENS:
        outputs = sum(tensor.untyped_storage().nbytes() for tensor in case.ours())
        extra = (peak_bytes(case.ours) - outputs) / (tokens * TOP_K)
    exact = [time for time, same in zip(peers, same_bits, strict=True) if same]
    return Figures(name, tokens, hidden, ours, min(exact, default=None), min(peers), extra)


def _equal(name: str, ours: tuple[torch.Tensor, ...], peers: tuple[torch.Tensor, ...]) -> bool:
    """Return whether all bits are equal.

    Raises:
        AssertionError: they differ by more than the order of a sum explains.
    """
    for got, want in zip(ours, peers, strict=True):
        if got.dtype.is_floating_point:
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05, msg=f"{name} differs")
    return all(map(torch.equal, ours, peers))


def _repeats(call: Callable[[], Any], seconds: float) -> tuple[int, int]:
    """Return (rounds, calls in a round) that fill about `seconds`."""
    once = max(_microseconds(call, 1) / 1e6, 1e-6)
    inner = max(1, int(2e-3 / once))
    return max(3, min(25, int(seconds / (once * inner)))), inner


def _microseconds(call: Callable[[], Any], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--hidden", type=int, nargs="*", default=HIDDEN)
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one op at one shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("op", "T", "H", "ours us", "same bits", "any order", "extra bytes / pair")
    figures = []
    with torch.inference_mode():
        for hidden in options.hidden:
            for tokens in options.tokens:
                for name in [name for name in CASES if options.only in name]:
                    case = CASES[name](tokens, hidden)
                    figures.append(measure(name, case, tokens, hidden, options.seconds))
                    _add_row(table, figures[-1])
                    del case
                    gc.collect()
    Console(width=110).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")


def _add_row(table: Table, figures: Figures) -> None:
    extra, exact, ours = figures.extra_bytes_per_pair, figures.same_bits_us, figures.ours_us
    table.add_row(
        figures.op,
        str(figures.tokens),
        str(figures.hidden),
        f"{ours:,.1f}",
        "-" if exact is None else f"{exact / ours:.2f}",
        f"{figures.any_peer_us / ours:.2f}",
        "-" if extra is None else f"{extra:.1f}",
    )


if __name__ == "__main__":
    main()
