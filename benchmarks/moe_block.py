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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import moe_graph  # first: loads the emulated Ascend stack where no CANN is installed

# isort: split
import torch
import torchair
from rich.console import Console
from rich.table import Table
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moe_graph.converters.decompositions import decompositions

HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, TOKENS = 512, 32, 4, 256, 2048
RESULTS = Path(__file__).parent / "results" / "moe_block.json"
OURS = "moe_graph, emulated NPU"
TORCHAIR = "TorchAir alone, batched_mm, emulated NPU"

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
            lambda block: torch.compile(block, backend=torchair_alone()),
        ),
        Peer(
            OURS,
            "grouped_mm",
            "npu",
            lambda block: torch.compile(block, backend=moe_graph.npu_backend(), fullgraph=True),
        ),
    ]


def torchair_alone() -> Callable[..., object]:
    """Return TorchAir's backend, with one decomposition without which it cannot run this block."""
    repeat = torch.ops.aten.repeat_interleave.self_int
    return torchair.get_npu_backend(custom_decompositions={repeat: decompositions()[repeat]})


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


@dataclass
class Candidate:
    """A peer that is compiled and has run once."""

    peer: Peer
    step: Callable[[], None]
    figures: Figures
    first_s: float
    times: list[float] = field(default_factory=list)

    @property
    def slow(self) -> bool:
        """Whether one measured step has to do."""
        return self.peer.experts == "batched_mm"


def prepare(peer: Peer, *, training: bool) -> Candidate:
    """Compile one peer and run it once; a peer that cannot run says why in its note."""
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

    graphs_before = _ge_graphs()
    try:
        first = _seconds(step)
    except Exception as error:  # a peer that fails is a result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raised = [index for index, line in enumerate(lines) if line.endswith("raised:")]
        return Candidate(peer, step, Figures(note=lines[raised[-1] + 1 if raised else 0]), 0.0)
    graphs = [nodes for key, nodes in _ge_graphs().items() if key not in graphs_before]
    figures = Figures(ge_nodes=sum(graphs) if peer.device == "npu" else None)
    return Candidate(peer, step, figures, first)


def _seconds(step: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _ge_graphs() -> dict[tuple[int, int], int]:
    """Return the graphs that live in the emulated engine and their numbers of nodes."""
    if not moe_graph.emulated:
        return {}
    from moe_graph.emulator.engine import session

    counts = session.node_counts().items()
    return {key: sum(sum(types.values()) for types in nodes.values()) for key, nodes in counts}


def gathered_weight_bytes() -> int:
    """Bytes of the weights that batched_mm gathers, one copy per (token, expert) pair."""
    return TOKENS * TOP_K * (3 * INTERMEDIATE * HIDDEN) * 4


def sweep(training: bool, rounds: int) -> dict[str, Figures]:
    """Measure every peer in one mode, round by round, so that noise meets all of them alike."""
    results, running = {}, []
    for peer in peers():
        if peer.experts == "batched_mm" and training:
            gib = gathered_weight_bytes() / 2**30
            note = f"not run: gathers {gib:.0f} GiB of weights, several times over"
            results[peer.name] = Figures(note=note)
            continue
        candidate = prepare(peer, training=training)
        results[peer.name] = candidate.figures
        if not candidate.figures.note:
            running.append(candidate)
    for number in range(rounds):
        for candidate in running:
            if number == 0 or not candidate.slow:
                candidate.times.append(_seconds(candidate.step))
    for candidate in running:
        median = statistics.median(candidate.times)
        candidate.figures.step_ms = median * 1e3
        if candidate.peer.compiler:
            candidate.figures.compile_s = max(candidate.first_s - median, 0.0)
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
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch._inductor.config.force_disable_caches = True  # or it compiles nothing the second time
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
        results = sweep(training, options.rounds)
        console.print(as_table(mode, results))
        saved[mode] = {name: asdict(figures) for name, figures in results.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(saved, indent=2))
    console.print(f"saved {RESULTS}")


if __name__ == "__main__":
    main()
