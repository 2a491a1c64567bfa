"""The shape rule of an op in symbols, for documentation.

    MoeInitRoutingV2, form "dropless, active_num": x [T, H], expert_idx [T, K], active_num = A
becomes
    expanded_x [Min(A, K*T), H], expanded_row_idx [K*T]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moe_graph.config import Soc
from moe_graph.ops.call import Call
from moe_graph.ops.form import Form
from moe_graph.ops.ir import REQUIRED, Attr, Input, TensorSpec, dtype_name
from moe_graph.ops.opdef import OpDef
from moe_graph.ops.product import current_product


@dataclass(frozen=True)
class SymbolicTensor:
    """A tensor of an op in symbols; ``<=`` in `shape` marks a dimension that is an upper bound."""

    name: str
    shape: str
    dtype: str


def inputs_of(opdef: OpDef, form: Form, soc: Soc | None = None) -> list[SymbolicTensor]:
    """Return the inputs that `form` gives, in IR order."""
    product = soc or current_product()
    shown = []
    for declared in opdef.inputs:
        given = form.shapes.get(declared.name)
        if given is not None:
            shapes = (given,) if isinstance(given, str) else given
            specs = [_spec(declared, shape, product) for shape in shapes]
            texts = ", ".join(_show(spec) for spec in specs)
            shown.append(SymbolicTensor(declared.name, texts, _dtypes(declared, product)))
    return shown


def outputs_of(opdef: OpDef, form: Form, soc: Soc | None = None) -> list[SymbolicTensor]:
    """Return the outputs that the shape rule gives for `form`; those not produced are left out.

    Raises:
        OpError: the form breaks the rule.
        TypeError: the rule compares symbols whose order is unknown.
    """
    product = soc or current_product()
    inputs: list[Any] = []
    for declared in opdef.inputs:
        given = form.shapes.get(declared.name)
        if isinstance(given, str):
            inputs.append(_spec(declared, given, product))
        elif given is None and declared.kind != "dynamic":
            inputs.append(None)
        else:
            inputs.append([_spec(declared, shape, product) for shape in given or ()])
    integers = {attr.name for attr in opdef.attrs if attr.type == "Int"}
    symbolic = {
        name: _symbols(value)[0]
        for name, value in form.attrs.items()
        if name in integers and isinstance(value, str)
    }
    constants = {name: value for name, value in form.attrs.items() if name not in symbolic}
    defaults = {attr.name: _default(attr) for attr in opdef.attrs}
    attrs = opdef.bind_attrs(defaults | constants) | symbolic
    specs = opdef.shape_rule(Call(opdef, inputs, attrs, product))
    shown = []
    for index, spec in enumerate(specs):
        output = opdef.outputs[min(index, len(opdef.outputs) - 1)]
        if spec is not None:
            shown.append(SymbolicTensor(output.name, _show(spec), dtype_name(spec.dtype)))
    return shown


def _default(attr: Attr) -> Any:
    """Return the default of an attribute; for one that has none, a value that stands for any."""
    stand_ins = {"Int": 1, "Bool": False, "Float": 1.0, "Str": "group", "ListInt": ()}
    return stand_ins[attr.type] if attr.default is REQUIRED else attr.default


def _spec(declared: Input, shape: str, soc: Soc) -> TensorSpec:
    dtypes = declared.columns(soc)
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0])
    return TensorSpec(tuple(_symbols(shape)), dtype)


def _symbols(shape: str) -> list[Any]:
    import sympy  # type: ignore[import-untyped]

    names = set(re.findall(r"[A-Za-z_]\w*", shape))
    known = {name: sympy.Symbol(name, integer=True, positive=True) for name in names}
    return [sympy.sympify(dim, locals=known) for dim in shape.split()]


def _show(spec: TensorSpec) -> str:
    dims = [
        f"<= {dim}" if index in spec.bounds else f"{dim}" for index, dim in enumerate(spec.shape)
    ]
    return "[" + ", ".join(dims) + "]"


def _dtypes(declared: Input, soc: Soc) -> str:
    return " | ".join(dict.fromkeys(dtype_name(dtype) for dtype in declared.columns(soc)))
