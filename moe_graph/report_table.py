"""Prints a :class:`~moe_graph.report.Report`: one table row per layer, reasons below it."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from moe_graph.report import LayerReport, Report

_WIDTH_WITHOUT_TERMINAL = 140


def render(report: Report) -> str:
    """Return the report as text, without colour codes, for ``str(report)``."""
    if not report.layers:
        return f"moe_graph: {_plural(report.graphs, 'graph')} compiled, no MoE layer found"
    width = max(int(os.environ.get("COLUMNS", 0)), _WIDTH_WITHOUT_TERMINAL)
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(_layer_table(report))
    for layer in report.kept:
        console.print(f"kept {layer.path} ({layer.source}):", markup=False)
        for reason in layer.reasons:
            console.print(f"  - {reason}", markup=False, soft_wrap=True)
    for why, paths in _kept_routers(report).items():
        console.print(f"router of {paths} stays:", markup=False)
        console.print(f"  - {why}", markup=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _kept_routers(report: Report) -> dict[str, str]:
    """Return reasons why routers stay, each once, with the first layer and the number of others."""
    paths: dict[str, list[str]] = {}
    for layer in report.rewritten:
        for reason in layer.router_reasons:
            # The same line of the model has another node in every layer.
            paths.setdefault(str(replace(reason, node=layer.router)), []).append(layer.path)
    return {
        reason: first + (f" and {len(others)} more" if others else "")
        for reason, (first, *others) in paths.items()
    }


def _layer_table(report: Report) -> Table:
    title = (
        f"moe_graph: {_plural(report.graphs, 'graph')}, "
        f"{len(report.rewritten)} of {_plural(len(report.layers), 'MoE layer')} rewritten"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    for name in ("source", "status", "form", "router"):
        table.add_column(name, overflow="fold")
    table.add_column("FX nodes", justify="right", no_wrap=True)
    table.add_column("GE nodes", overflow="fold")
    for layer in report.layers:
        table.add_row(
            layer.path,
            layer.source,
            layer.status,
            layer.form or "-",
            layer.router or "-",
            f"{layer.fx_nodes_before} -> {layer.fx_nodes_after}",
            _ge_nodes(layer),
        )
    return table


def _ge_nodes(layer: LayerReport) -> str:
    """Fused ops by name and count; everything else of the region as one number."""
    fused = Counter({op: n for op, n in layer.ge_nodes.items() if _is_fused(op)})
    names = [f"{op} x{n}" if n > 1 else op for op, n in fused.items()]
    rest = sum(layer.ge_nodes.values()) - fused.total()
    if rest:
        names.append(f"{rest} other")
    return ", ".join(names) or "-"


def _is_fused(op_type: str) -> bool:
    return op_type.startswith(("Moe", "GroupedMatmul", "SwiGlu"))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
