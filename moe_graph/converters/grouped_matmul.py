"""GE lowering of GroupedMatmul in its list form and its single form.

    moe_graph.grouped_matmul_single(x, w, None, group_list)
        ->  GroupedMatmul(x=[x], weight=[w], bias=[e0], scale=[e1], ..., group_list)  split_item=3

``e0``, ``e1``, ... are empty constants ``[0]``: GE's GroupedMatmul wants at least one tensor per
dynamic input. TorchAir's own converter makes three nodes for each; here all nodes of a graph share
one constant per dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.converters.generic import emit
from moe_graph.ops.defs.products.grouped_matmul import OPDEF
from moe_graph.ops.defs.products.grouped_matmul_single import NAME, ir_arguments
from moe_graph.ops.torch_binding import ir_arguments as list_form_arguments
from moe_graph.ops.torch_binding import torch_name

_empties: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


def register_grouped_matmul() -> None:
    """Register the converters of both torch ops."""
    import torchair

    list_form = getattr(torch.ops.moe_graph, torch_name(OPDEF.ge_type)).default
    single_form = getattr(torch.ops.moe_graph, NAME).default

    def convert_list(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        inputs, attrs = list_form_arguments(OPDEF, args, kwargs)
        return emit(OPDEF, _with_empties(inputs), attrs, len(meta_outputs))

    def convert_single(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        inputs, attrs = ir_arguments(args, kwargs)
        (y,) = emit(OPDEF, _with_empties(inputs), attrs)
        return y

    torchair.register_fx_node_ge_converter(list_form)(convert_list)
    torchair.register_fx_node_ge_converter(single_form)(convert_single)


def _with_empties(inputs: Sequence[Any]) -> list[Any]:
    """Put an empty constant into each dynamic input that has no tensor."""
    dtypes = _empty_dtypes(inputs[0][0].dtype, inputs[1][0].dtype)
    return [
        [_empty(dtypes[declared.name])] if declared.kind == "dynamic" and not value else value
        for declared, value in zip(OPDEF.inputs, inputs, strict=True)
    ]


def _empty_dtypes(x: int, weight: int) -> dict[str, int]:
    """Return the ``ge.DataType`` of absent inputs, which GE's dtype columns count as present."""
    from torchair.ge import DataType

    bias = (
        DataType.DT_FLOAT16 if x in (DataType.DT_FLOAT16, DataType.DT_INT4) else DataType.DT_FLOAT
    )
    if x == weight == DataType.DT_INT8:
        bias = DataType.DT_INT32
    quantised_weight = x == DataType.DT_BF16 and weight != x
    antiquant = DataType.DT_BF16 if quantised_weight else DataType.DT_FLOAT16
    return {
        "bias": bias,
        "scale": DataType.DT_UINT64,
        "offset": DataType.DT_FLOAT,
        "antiquant_scale": antiquant,
        "antiquant_offset": antiquant,
    }


def _empty(dtype: int) -> Any:
    """Return the current graph's empty constant of a ge.DataType."""
    from torchair import ge
    from torchair.ge._ge_graph import get_default_ge_graph

    of_graph = _empties.setdefault(get_default_ge_graph(), {})
    if dtype not in of_graph:
        of_graph[dtype] = ge.Const([], dtype=dtype)
    return of_graph[dtype]
