"""Writes what a graph looked like at each stage, for ``Config(dump_dir=...)``.

Files, with ``<n>`` the number of the dynamo graph::

    fx_<n>_before.txt   dynamo's graph as it came
    fx_<n>_after.txt    the same graph after the passes
    aten_<n>_<m>.txt    the ATen graphs that AOT made of it: forward, then backward
    ge_<n>_<m>.txt      the GE graph of that ATen graph, as protobuf text
    ge_<n>_<m>.pbtxt    the same for TensorBoard
    ge_<n>_<m>.py       the same as TorchAir's Python code
    report.json         the report so far
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.fx

from moe_graph.provenance import GE_ATTRIBUTE
from moe_graph.report import Report

_GE_FORMATS = ("txt", "pbtxt", "py")


class Dumps:
    """The files of one dynamo graph; writes nothing when `root` is None."""

    def __init__(self, root: Path | None, number: int) -> None:
        self._root = root
        self._number = number
        self._aten_graphs = 0
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)

    def write_fx(self, stage: str, gm: torch.fx.GraphModule) -> None:
        """Write dynamo's graph; `stage` is ``"before"`` or ``"after"`` the passes."""
        self._write_graph(f"fx_{self._number}_{stage}.txt", gm)

    def write_aten(self, gm: torch.fx.GraphModule) -> None:
        """Write one ATen graph, in the order in which AOT makes them."""
        self._write_graph(f"aten_{self._number}_{self._aten_graphs}.txt", gm)
        self._aten_graphs += 1

    def _write_graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self._root is not None:
            code = gm.print_readable(print_output=False, include_stride=False)
            (self._root / name).write_text(code)

    def write_ge(self, ge_graph: Any) -> None:
        """Write the GE graph that the last ATen graph became, in TorchAir's three formats."""
        if self._root is None:
            return
        from torchair._ge_concrete_graph.utils import dump_graph

        stem = self._root / f"ge_{self._number}_{self._aten_graphs - 1}"
        for extension in _GE_FORMATS:
            dump_graph(f"{stem}.{extension}", ge_graph)
        with Path(f"{stem}.py").open("a") as file:
            file.write(_custom_nodes(ge_graph))

    def write_report(self, report: Report) -> None:
        """Write the report, over what an earlier graph wrote."""
        if self._root is not None:
            (self._root / "report.json").write_text(report.to_json())


def _custom_nodes(ge_graph: Any) -> str:
    """List the nodes made by ``ge.custom_op``: TorchAir's Python dump leaves them out."""
    words = set(re.findall(r"\w+", ge_graph.python_code))
    lines = [_as_call(op) for op in ge_graph.op if f"{op.name}_0" not in words]
    if not lines:
        return ""
    head = "# Nodes made by ge.custom_op; they belong above, in the order of their inputs."
    return "\n".join(("", head, *lines, ""))


def _as_call(op: Any) -> str:
    descs = iter(op.input_desc)
    inputs = {next(descs).name: name for name in op.input if not name.endswith(":-1")}
    attrs = {name: _attr_value(op.attr[name]) for name in op.attr if not name.startswith("_")}
    attrs.pop(GE_ATTRIBUTE, None)
    return f"# {op.name} = ge.custom_op({op.type!r}, inputs={inputs}, attrs={attrs})"


def _attr_value(attr: Any) -> Any:
    kind = attr.WhichOneof("value")
    value: Any = getattr(attr, kind) if kind else None
    if kind == "list":
        return list(value.i) or list(value.f) or list(value.b) or list(value.s)
    return value
