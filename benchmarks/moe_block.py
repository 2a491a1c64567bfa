"""One MoE block: compile seconds, GE nodes and step time, moe_graph against every alternative.

All peers run the same Mixtral block of transformers with the same weights on the same inputs, in
fp32, in one process. A peer on the emulated NPU and a peer on the CPU use the same cores. Figures
are medians; read the ratios, which come from one run, not the seconds.

Writes ``benchmarks/results/moe_block.json``.
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

import moe_graph  # first: loads the emulated Ascend stack where no CANN is installed

# isort: split
import torch
import torchair
from rich.console import Console
from rich.table import Table
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, TOKENS = 512, 32, 4, 256, 2048
RESULTS = Path(__file__).parent / "results" / "moe_block.json"
OURS = "moe_graph, emulated NPU"
TORCHAIR = "TorchAir, batched_mm, emulated NPU"

Compiler = Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Peer:
    """One way to run the block."""

    name: str
    experts: str
    device: str
    compiler: Compiler | None


@dataclass
class Figures:
    """What was measured of one peer; None where it cannot run, with the reason in `note`."""

    compile_s: float | None = None
    ge_nodes: int | None = None
    step_ms: float | None = None
    note: str = ""


def peers() -> list[Peer]:
    """Return all peers, ours last."""
    return [
        Peer("eager loop, CPU", "eager", "cpu", None),
        Peer("eager grouped_mm, CPU", "grouped_mm", "cpu", None),
        Peer("inductor grouped_mm, CPU", "grouped_mm", "cpu", torch.compile),
        Peer(
            TORCHAIR,
            "batched_mm",
            "npu",
            lambda block: torch.compile(block, backend=torchair.get_npu_backend()),
        ),
        Peer(
            OURS,
            "grouped_mm",
            "npu",
            lambda block: torch.compile(block, backend=moe_graph.npu_backend(), fullgraph=True),
        ),
    ]


def make_block(experts: str) -> MixtralSparseMoeBlock:
    """Return the block with fixed random weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = experts
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block


def measure(peer: Peer, *, training: bool, repeats: int) -> Figures:
    """Measure one peer; a peer that cannot run says why in its note."""
    torch._dynamo.reset()
    block = make_block(peer.experts).to(peer.device).train(training)
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(peer.device).requires_grad_(training)
    run = peer.compiler(block) if peer.compiler else block
    grad = torch.ones_like(hidden)

    def step() -> None:
        if training:
            run(hidden).backward(grad)
            block.zero_grad(set_to_none=True)
            hidden.grad = None
        else:
            with torch.no_grad():
                run(hidden)

    try:
        first = _seconds(step)
    except Exception as error:  # a peer that fails is a result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Figures(note=f"{type(error).__name__}: {lines[0][:90]}")
    times = [_seconds(step) for _ in range(repeats)]
    median = statistics.median(times)
    nodes = _ge_nodes() if peer.device == "npu" else None
    compile_s = max(first - median, 0.0) if peer.compiler else None
    return Figures(compile_s, nodes, median * 1e3)


def _seconds(step: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _ge_nodes() -> int | None:
    """Count the GE nodes of the graphs that live in the emulated engine."""
    if not moe_graph.emulated:
        return None
    from moe_graph.emulator.engine import session

    return sum(sum(counts.values()) for counts in session.node_counts().values())


def gathered_weight_bytes() -> int:
    """Bytes of the weights that batched_mm gathers, one copy per (token, expert) pair."""
    return TOKENS * TOP_K * (3 * INTERMEDIATE * HIDDEN) * 4


def sweep(training: bool, repeats: int) -> dict[str, Figures]:
    """Measure every peer in one mode."""
    results = {}
    for peer in peers():
        slow = peer.experts == "batched_mm"
        if slow and training:
            gib = gathered_weight_bytes() / 2**30
            results[peer.name] = Figures(
                note=f"not run: gathers {gib:.0f} GiB of weights, several times over"
            )
            continue
        results[peer.name] = measure(peer, training=training, repeats=1 if slow else repeats)
        gc.collect()
    return results


def as_table(mode: str, results: dict[str, Figures]) -> Table:
    """Return the figures with the ratio of our step time to each peer's."""
    ours = results[OURS].step_ms
    table = Table(title=f"{mode}, {torch.get_num_threads()} thread(s)", title_justify="left")
    for name in ("peer", "compile s", "GE nodes", "step ms", "moe_graph / peer", "note"):
        table.add_column(name, justify="left" if name in ("peer", "note") else "right")
    for name, figures in results.items():
        ratio = ours / figures.step_ms if ours and figures.step_ms else None
        table.add_row(
            name,
            _number(figures.compile_s, 2),
            _number(figures.ge_nodes, 0),
            _number(figures.step_ms, 1),
            _number(ratio, 2),
            figures.note,
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    console = Console(width=150)
    saved: dict[str, object] = {
        "shape": {
            "hidden": HIDDEN,
            "experts": EXPERTS,
            "top_k": TOP_K,
            "intermediate": INTERMEDIATE,
            "tokens": TOKENS,
        },
        "threads": torch.get_num_threads(),
    }
    for mode, training in (("inference", False), ("training", True)):
        results = sweep(training, options.repeats)
        console.print(as_table(mode, results))
        saved[mode] = {name: asdict(figures) for name, figures in results.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(saved, indent=2))
    console.print(f"saved {RESULTS}")


if __name__ == "__main__":
    main()
