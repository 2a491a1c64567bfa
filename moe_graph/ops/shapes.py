"""``infer_shape``: the shape rule of an op, for callers who have shapes and not tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import Dim
from moe_graph.ops.errors import OpError
from moe_graph.ops.opdef import OpDef, TensorSpec
from moe_graph.ops.registry import all_opdefs, find

_GE_DTYPE_NAMES = {
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "double": torch.float64,
    "float8_e8m0": torch.float8_e8m0fnu,
    "float4_e2m1": torch.float4_e2m1fn_x2,
}

ShapeAndDtype = tuple[Sequence[Dim], "torch.dtype | str"]


def infer_shape(
    op_type: str,
    inputs: Sequence[ShapeAndDtype | Sequence[ShapeAndDtype] | None],
    attrs: Mapping[str, Any],
    soc: Soc | str | None = None,
    *,
    upstream: bool = False,
) -> list[tuple[Dim, ...] | None]:
    """Return the output shapes that GE infers for an op.

    Args:
        op_type: GE type, for example ``"MoeInitRoutingV2"``.
        inputs: ``(shape, dtype)`` per IR input, in order; None for an absent optional input, a list
            for a dynamic one, or its only tensor. A dimension is an int, -1 (unknown), a SymInt or
            a sympy expression; the shape ``[-2]`` is an unknown rank. The dtype is a
            ``torch.dtype`` or its name (``"bfloat16"``, also GE's in any case: ``"bf16"``,
            ``"float"``, ``"DT_INT8"``).
            No input of these ops is a scalar: the shape ``[]`` of an optional input is GE's way of
            saying that it is absent.
        attrs: attributes by IR name, or spelled as the aclnn API does (``numOutTokens``); those
            left out have their IR default. Required ones may be left out where the rule does not
            read them.
        soc: product, ``"A2"``, ``"A3"`` or ``"950"``, or CANN's name of a device
            (``"Ascend910B3"``); None takes the current one.
        upstream: give the public rule's answer also where it is plainly wrong for unknown sizes.

    Returns:
        One shape per output, None for an output that the attributes switch off.

    Raises:
        OpError: an unknown op, or dtypes, shapes or attributes that GE's infershape rejects.
    """
    opdef = find(op_type)
    if opdef is None:
        known = ", ".join(sorted(known.ge_type for known in all_opdefs()))
        raise OpError(op_type, "op_type", got=repr(op_type), want=f"one of {known}")
    product = _product(soc)
    specs = opdef.infer_shape(
        _specs(opdef, inputs),
        opdef.bind_attrs(_ir_names(attrs), complete=False),
        product,
        upstream=upstream,
    )
    return [None if spec is None else spec.shape for spec in specs]


def _product(soc: Soc | str | None) -> Soc | None:
    if soc is None or isinstance(soc, Soc):
        return soc
    return Soc.of_device(soc) if soc.startswith("Ascend") else Soc.parse(soc)


def _specs(opdef: OpDef, inputs: Sequence[Any]) -> list[Any]:
    specs = [_spec(opdef.ge_type, item) for item in inputs]
    for position, (declared, spec) in enumerate(zip(opdef.inputs, specs, strict=False)):
        if declared.kind == "optional" and isinstance(spec, TensorSpec) and not spec.shape:
            specs[position] = None
        if declared.kind == "dynamic" and isinstance(spec, TensorSpec):
            specs[position] = [spec]
    return specs


def _ir_names(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): attrs[name] for name in attrs}


def _spec(op_type: str, item: Any) -> Any:
    if item is None:
        return None
    if _is_shape_and_dtype(item):
        shape, dtype = item
        return TensorSpec(tuple(shape), _dtype(op_type, dtype))
    return [_spec(op_type, element) for element in item]


def _is_shape_and_dtype(item: Any) -> bool:
    return len(item) == 2 and isinstance(item[1], (str, torch.dtype))


def _dtype(op_type: str, dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.lower().removeprefix("dt_")
    found = _GE_DTYPE_NAMES.get(name, getattr(torch, name, None))
    if not isinstance(found, torch.dtype):
        raise OpError(op_type, "dtype", got=repr(dtype), want="the name of a torch dtype")
    return found
