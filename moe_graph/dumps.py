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
_ASSIGNED = re.compile(r"^(.+?) = ge\.", re.MULTILINE)


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
    written = set(re.findall(r"\w+", " ".join(_ASSIGNED.findall(ge_graph.python_code))))
    left_out = [op for op in ge_graph.op if not written.issuperset(_variables(op))]
    # The dump writes a constant where it is used, so only those of nodes left out are missing.
    used = {edge.rpartition(":")[0] for op in left_out for edge in op.input}
    lines = [_as_call(op) for op in left_out if op.type != "Const" or op.name in used]
    if not lines:
        return ""
    head = "# Nodes made by ge.custom_op; they belong above, in the order of their inputs."
    return "\n".join(("", head, *lines, ""))


def _variables(op: Any) -> list[str]:
    """Return the names of a node's outputs in the Python dump."""
    return [f"{op.name}_{index}" for index in range(len(op.output_desc))]


def _as_call(op: Any) -> str:
    edges = [edge for edge in op.input if not edge.endswith(":-1")]  # without control edges
    inputs = {
        desc.name: edge.replace(":", "_")
        for desc, edge in zip(op.input_desc, edges, strict=True)
        if edge
    }
    attrs = {name: _attr_value(op.attr[name]) for name in op.attr if not name.startswith("_")}
    attrs.pop(GE_ATTRIBUTE, None)
    outputs = ", ".join(_variables(op))
    return f"# [{outputs}] = ge.custom_op({op.type!r}, inputs={inputs}, attrs={attrs})"


def _attr_value(attr: Any) -> Any:
    kind = attr.WhichOneof("value")
    value: Any = getattr(attr, kind) if kind else None
    if kind == "list":
        return list(value.i) or list(value.f) or list(value.b) or list(value.s)
    if kind == "s":
        return value.decode()
    if kind == "t":
        from torchair._ge_concrete_graph.ge_ir_pb2 import DataType

        return f"{DataType.Name(value.desc.dtype)}{list(value.desc.shape.dim)}"
    return value
