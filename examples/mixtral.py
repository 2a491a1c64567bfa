"""The main job on a real model: Mixtral of transformers, unmodified, compiled for Ascend.

1. Runs the model eagerly and compiled on the same tokens and prints the report, the largest
   difference, and the GE nodes of each layer next to what TorchAir alone does with it.
2. Trains it for 20 steps on the text in ``data/``, eagerly and compiled side by side.

On a machine without CANN everything runs on the emulated Ascend stack.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from pathlib import Path

import moe_graph  # first: loads the emulated Ascend stack where no CANN is installed

# isort: split
import torch
import torchair
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import MixtralConfig, MixtralForCausalLM

TEXT = Path(__file__).parent / "data" / "harbour.txt"
LOGIT_TOLERANCE = 1e-5
# Routing is discrete: after some steps a difference in rounding sends a token to another expert.
LOSS_TOLERANCE = 1e-3

console = Console()


def small_mixtral(layers: int) -> MixtralForCausalLM:
    """Return a Mixtral with random weights: 8 experts, top-2, one token per byte."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def batches(steps: int, rows: int = 2, length: int = 64) -> list[torch.Tensor]:
    """Return `steps` tensors [rows, length] of byte tokens from the text, in order."""
    tokens = torch.tensor(list(TEXT.read_bytes()), dtype=torch.int64)
    tokens = tokens.repeat(-(-steps * rows * length // tokens.numel()))
    return list(tokens[: steps * rows * length].view(steps, rows, length))


def infer(model: MixtralForCausalLM, dump_dir: Path) -> bool:
    """Compare eager and compiled logits; print the report and the GE nodes."""
    input_ids = batches(1)[0].to("npu")
    backend = moe_graph.npu_backend(moe_graph.Config(dump_dir=dump_dir))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = model(input_ids).logits
        start = time.perf_counter()
        logits = compiled(input_ids).logits
        seconds = time.perf_counter() - start
    error = (logits - expected).abs().max().item()
    print(backend.report)
    console.print(f"compiled in {seconds:.1f} s; largest difference of a logit: {error:.2e}")
    console.print(_nodes_per_layer(model, input_ids, backend.report))
    console.print(f"dumps: {dump_dir}")
    return error <= LOGIT_TOLERANCE


def _nodes_per_layer(
    model: MixtralForCausalLM, input_ids: torch.Tensor, report: moe_graph.Report
) -> Table:
    """Return a table of what each layer becomes here and under TorchAir alone."""
    nodes: Counter[str] = Counter()
    for layer in report.rewritten:
        nodes.update(layer.ge_nodes)
    layers = max(len(report.rewritten), 1)
    table = Table(title="GE nodes of one MoE layer", title_justify="left")
    table.add_column("with moe_graph")
    table.add_column("nodes", justify="right")
    table.add_column("TorchAir alone", overflow="fold")
    alone = _torchair_alone(model, input_ids)
    for row, (op, count) in enumerate(nodes.items()):
        table.add_row(op, f"{count / layers:g}", alone if row == 0 else "")
    return table


def _torchair_alone(model: MixtralForCausalLM, input_ids: torch.Tensor) -> str:
    """Compile the first MoE layer with TorchAir alone; return what became of it."""
    torch._dynamo.reset()
    layer = model.model.layers[0].mlp
    hidden = torch.randn(1, input_ids.shape[1], model.config.hidden_size, device="npu")
    try:
        with torch.no_grad():
            torch.compile(layer, backend=torchair.get_npu_backend())(hidden)
    except Exception as error:  # whatever it raises is what a user sees
        return f"fails: {_what_torchair_said(error)}"
    return "compiles"


def _what_torchair_said(error: Exception) -> str:
    """Return the first line of an error that is TorchAir's own, not dynamo's frame around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [index for index, line in enumerate(lines) if line.endswith("raised:")]
    return lines[raised[-1] + 1] if raised else lines[0]


def train(model: MixtralForCausalLM, steps: int) -> bool:
    """Train two copies side by side, eager and compiled; return whether the losses agree."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    backend = moe_graph.npu_backend()
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    runs = ((model, model), (twin, compiled))
    optimizers = [torch.optim.AdamW(owner.parameters(), lr=1e-3) for owner, _ in runs]
    table = Table("step", "eager loss", "compiled loss", "difference", title_justify="left")
    worst = 0.0
    for step, tokens in enumerate(track(batches(steps), description="training")):
        input_ids = tokens.to("npu")
        losses = []
        for (_, forward), optimizer in zip(runs, optimizers, strict=True):
            loss = forward(input_ids, labels=input_ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]))
        table.add_row(
            str(step), *(f"{loss:.6f}" for loss in losses), f"{losses[1] - losses[0]:+.1e}"
        )
    console.print(table)
    rewritten = len(backend.report.rewritten)
    console.print(f"{rewritten} MoE layers trained as fused ops; largest difference {worst:.1e}")
    return worst <= LOSS_TOLERANCE and rewritten == model.config.num_hidden_layers


def main() -> int:
    """Run both parts; return 0 when every comparison is within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dump-dir", type=Path, default=Path("moe_graph_dump"))
    options = parser.parse_args()
    model = small_mixtral(options.layers).to("npu").eval()
    logits_agree = infer(model, options.dump_dir)
    losses_agree = train(model.train(), options.steps)
    for name, agree in (("logits", logits_agree), ("losses", losses_agree)):
        console.print(f"{name} equal within tolerance: {'yes' if agree else 'NO'}")
    return 0 if logits_agree and losses_agree else 1


if __name__ == "__main__":
    sys.exit(main())
