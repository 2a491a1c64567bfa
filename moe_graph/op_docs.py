"""What the OpDefs say, for readers: one table of all ops, and one page for each.

The table of the README is made here (``python -m moe_graph ops --markdown``).
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from moe_graph.config import Soc
from moe_graph.ops import OpDef, all_opdefs
from moe_graph.ops.ir import REQUIRED, dtype_name
from moe_graph.ops.symbolic import inputs_of, outputs_of
from moe_graph.ops.torch_binding import torch_name

HEADERS = ("op", "forward", "backward", "products", "limits")


def rows() -> list[tuple[str, str, str, str, str]]:
    """Return one row per op under :data:`HEADERS`."""
    return [
        (
            opdef.ge_type,
            f"ops.{opdef.function}" if opdef.function else torch_form(opdef),
            "yes" if opdef.autograd else "no",
            ", ".join(soc.value for soc in opdef.products),
            "; ".join(_limit_texts(opdef)) or "-",
        )
        for opdef in all_opdefs()
    ]


def table() -> Table:
    """Return the table of all ops for a terminal."""
    shown = Table(title=f"moe_graph: {len(all_opdefs())} ops", title_justify="left")
    for header in HEADERS:
        shown.add_column(header, no_wrap=header == "op", overflow="fold")
    for row in rows():
        shown.add_row(*row)
    return shown


def markdown() -> str:
    """Return the table of all ops as markdown."""
    lines = ["| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    for op, function, *rest in rows():
        lines.append("| " + " | ".join([f"`{op}`", f"`{function}`", *rest]) + " |")
    return "\n".join(lines)


def describe(opdef: OpDef, console: Console, soc: Soc | None = None) -> None:
    """Print everything that the OpDef states: IR, shape rule in symbols, limits, gradient."""
    console.print(f"[bold]{opdef.ge_type}[/bold]  {torch_form(opdef)}")
    if opdef.function:
        console.print(f"function   moe_graph.ops.{opdef.function}")
    console.print(f"products   {_products(opdef)}")
    console.print(f"backward   {backward_of(opdef)}")
    console.print(f"source     {opdef.doc}", highlight=False)
    console.print(_ir_table(opdef, soc))
    for form in opdef.forms:
        attrs = ", ".join(f"{name}={value}" for name, value in form.attrs.items())
        shapes = Table("", "tensor", "shape", "dtype", title_justify="left", box=None)
        shapes.title = f"{form.name}" + (f"  ({attrs})" if attrs else "")
        for tensor in inputs_of(opdef, form, soc):
            shapes.add_row("in", tensor.name, tensor.shape, tensor.dtype)
        for tensor in outputs_of(opdef, form, soc):
            shapes.add_row("out", tensor.name, tensor.shape, tensor.dtype)
        console.print(shapes, markup=False)
    if opdef.forms:
        console.print("<= n: an upper bound, how much is written depends on the data", markup=False)
    if opdef.limits:
        limits = Table("limit", "products", "source", title="limits", title_justify="left")
        for limit in opdef.limits:
            limits.add_row(str(limit), _names(limit.products), limit.source)
        console.print(limits)


def called(name: str) -> list[OpDef]:
    """Return the ops of this GE type, torch name or public function; none when there is none."""
    return [
        opdef
        for opdef in all_opdefs()
        if name in (opdef.ge_type, torch_name(opdef.ge_type), opdef.function)
    ]


def torch_form(opdef: OpDef) -> str:
    """Return the torch op that is made from `opdef`."""
    return f"torch.ops.moe_graph.{torch_name(opdef.ge_type)}"


def backward_of(opdef: OpDef) -> str:
    """Return whether the op has a gradient, and why not."""
    if opdef.autograd is not None:
        return "yes"
    return f"no: {opdef.no_gradient}" if opdef.no_gradient else "no"


def _products(opdef: OpDef) -> str:
    in_engine = opdef.ge_products or opdef.products
    note = "" if in_engine == opdef.products else f" (in GE graphs: {_names(in_engine)})"
    return _names(opdef.products) + note


def _names(products: Iterable[Soc]) -> str:
    return ", ".join(soc.value for soc in products)


def _limit_texts(opdef: OpDef) -> list[str]:
    texts = []
    for limit in opdef.limits:
        everywhere = set(limit.products) >= set(opdef.products)
        texts.append(str(limit) if everywhere else f"{limit} ({_names(limit.products)})")
    return texts


def _ir_table(opdef: OpDef, soc: Soc | None) -> Table:
    ir = Table("IR", "name", "kind", "dtypes or default")
    product = soc or Soc.A2
    for declared in opdef.inputs:
        names = dict.fromkeys(dtype_name(dtype) for dtype in declared.columns(product))
        ir.add_row("input", declared.name, declared.kind, ", ".join(names))
    for output in opdef.outputs:
        kind = "dynamic" if output.dynamic else "required" if output.required else "optional"
        ir.add_row(
            "output",
            output.name,
            kind,
            dtype_name(output.dtype) if output.dtype else "as its rule says",
        )
    for attr in opdef.attrs:
        default = "required" if attr.default is REQUIRED else str(attr.default)
        ir.add_row("attr", attr.name, attr.type, default)
    return ir
