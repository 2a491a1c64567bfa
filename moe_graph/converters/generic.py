"""The GE lowering that follows from an OpDef: one torch op becomes one GE node.

    moe_graph.moe_init_routing_v2(x, ids, expert_num=8)  ->  MoeInitRoutingV2(x, expert_idx)
                                                              attrs {expert_num: 8}

All IR outputs are mapped, produced or not, since TorchAir hands symbolic shape rules only to nodes
whose outputs all have a torch counterpart. Attributes that equal the IR's default are left to GE:
a CANN that is older than an attribute then still takes the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.ops.opdef import OpDef
from moe_graph.ops.product import current_product
from moe_graph.ops.torch_binding import ir_arguments, torch_name


def register(opdef: OpDef) -> None:
    """Register the converter of the torch op that was generated from `opdef`."""
    import torchair

    overload = getattr(torch.ops.moe_graph, torch_name(opdef.ge_type)).default

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        inputs, attrs = ir_arguments(opdef, args, kwargs)
        dynamic_outputs = len(meta_outputs) if isinstance(meta_outputs, list) else 1
        return emit(opdef, inputs, attrs, dynamic_outputs)

    torchair.register_fx_node_ge_converter(overload)(convert)


def emit(
    opdef: OpDef, inputs: Sequence[Any], attrs: dict[str, Any], dynamic_outputs: int = 1
) -> Any:
    """Add a GE node to the current graph.

    Args:
        opdef: the op.
        inputs: ge.Tensor, None or a list of ge.Tensor per IR input.
        attrs: every attribute, see :meth:`OpDef.bind_attrs`.
        dynamic_outputs: number of tensors of a dynamic output.

    Returns:
        The ge.Tensor of a single output, a list for a dynamic one, else a tuple.

    Raises:
        RuntimeError: GE does not know the op.
        OpError: the graph engine of the product has no such op.
    """
    from torchair import ge

    product = current_product()
    opdef.require_in_graph_engine(product)
    return ge.custom_op(
        opdef.ge_type,
        inputs={
            declared.name: value
            for declared, value in zip(opdef.inputs, inputs, strict=True)
            if declared.exists_on(product)
        },
        outputs=[
            (output.name, dynamic_outputs) if output.dynamic else output.name
            for output in opdef.outputs
        ],
        attrs={
            attr.name: getattr(ge.attr, attr.type)(_plain(attrs[attr.name]))
            for attr in opdef.attrs
            if attrs[attr.name] != attr.default
        },
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
