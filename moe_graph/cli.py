"""The command line.

::

    python -m moe_graph doctor            versions, CANN or emulated, product, devices
    python -m moe_graph doctor SCRIPT     the ops of a script's models that have no lowering
    python -m moe_graph explain SCRIPT    what becomes of the MoE layers of a script's models
    python -m moe_graph run SCRIPT        runs a script that imports torch first
    python -m moe_graph ops               every op: function, gradient, products, limits
    python -m moe_graph ops NAME          one op: IR, shape rule in symbols, limits with sources

``doctor``, ``explain`` and ``run`` execute the script as ``python SCRIPT`` would. It may be any
script: the emulated stack is loaded before its first line where no CANN is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch_npu
from rich.console import Console
from rich.table import Table

import moe_graph
from moe_graph import op_docs
from moe_graph.backend import MoeGraphBackend
from moe_graph.config import Config, Soc
from moe_graph.inspection import Doctor, every_compile_uses

_WIDTH_WITHOUT_TERMINAL = 140
_PACKAGES = ("moe_graph", "torch", "torch_npu", "transformers", "numpy", "protobuf")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m moe_graph", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("doctor", "check the installation, or list a script's ops without a lowering"),
        ("explain", "compile a script's models and report on their MoE layers"),
        ("run", "run a script that imports torch first"),
    ):
        command = commands.add_parser(name, help=text)
        nargs = "?" if name == "doctor" else None
        command.add_argument("script", nargs=nargs, type=Path, help="path of a Python script")
        command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
        if name == "explain":
            command.add_argument("--json", action="store_true", help="print the report as JSON")
    ops = commands.add_parser("ops", help="print what the definitions of the ops say")
    ops.add_argument("name", nargs="?", help="GE type or torch function of one op")
    ops.add_argument("--soc", type=Soc.parse, help="product to print the IR and the rule for")
    ops.add_argument("--markdown", action="store_true", help="print the table of all ops for docs")
    options = parser.parse_args(argv)
    if options.command == "ops":
        return _ops(options.name, options.soc, as_markdown=options.markdown)
    if options.script is not None and not options.script.is_file():
        parser.error(f"no such script: {options.script}")
    if options.command == "run":
        _run_script(options.script, options.args)
        return 0
    if options.command == "explain":
        return _explain(options.script, options.args, as_json=options.json)
    return _doctor() if options.script is None else _examine(options.script, options.args)


def _run_script(script: Path, args: Sequence[str]) -> None:
    """Execute `script` as the main program, with its own folder first on the import path."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path


def _ops(name: str | None, soc: Soc | None, *, as_markdown: bool) -> int:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    if as_markdown:
        print(op_docs.markdown())
    elif name is None:
        console.print(op_docs.table())
    else:
        opdefs = op_docs.called(name)
        if not opdefs:
            console.print(f"no such op: {name}; `python -m moe_graph ops` lists all", markup=False)
            return 1
        for opdef in opdefs:
            op_docs.describe(opdef, console, soc)
    return 0


def _explain(script: Path, args: Sequence[str], *, as_json: bool) -> int:
    backend = MoeGraphBackend(Config(on_miss="ignore"))
    script_output = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with script_output, every_compile_uses(backend):
        _run_script(script, args)
    print(backend.report.to_json() if as_json else backend.report)
    return 0 if backend.report.graphs else _nothing_compiled(script)


def _examine(script: Path, args: Sequence[str]) -> int:
    doctor = Doctor()
    with every_compile_uses(doctor):
        _run_script(script, args)
    if not doctor.report.graphs:
        return _nothing_compiled(script)
    if not doctor.missing:
        print(f"every op of {doctor.report.graphs} graph(s) has a lowering")
        return 0
    table = Table(title="ops without a lowering to the graph engine", title_justify="left")
    for name in ("op", "nodes", "why", "first in"):
        table.add_column(name, overflow="fold")
    for entry in doctor.missing:
        table.add_row(entry.op, str(entry.count), entry.why, entry.where)
    Console().print(table)
    return 1


def _nothing_compiled(script: Path) -> int:
    print(f"{script} compiled nothing: wrap its model in torch.compile", file=sys.stderr)
    return 2


def _doctor() -> int:
    table = Table(title="moe_graph doctor", title_justify="left", show_header=False)
    table.add_row("Python", platform.python_version())
    for name in _PACKAGES:
        table.add_row(name, _version_of(name))
    table.add_row("CANN", "emulated" if moe_graph.emulated else "installed")
    table.add_row("product", Config().product.value)
    available = torch_npu.npu.is_available()
    table.add_row("devices", str(torch_npu.npu.device_count()) if available else "none")
    if available:
        table.add_row("device 0", torch_npu.npu.get_device_name(0))
    Console().print(table)
    return 0 if available else 1


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
