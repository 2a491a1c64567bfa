"""Ascend 950 has no MoeTokenPermute in its graph engine: other ops serve it and its kin.

    moe_graph.moe_token_permute(tokens, indices)
becomes, on Ascend 950,
    moe_graph.moe_init_routing_v2(tokens, indices)

:mod:`moe_graph.ops.defs.token_permute.on_950` says which op serves with which arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_graph.config import Soc
from moe_graph.ops import OpDef, current_product, find
from moe_graph.ops.defs.token_permute.on_950 import SERVED_TYPES, served_by
from moe_graph.ops.torch_binding import ir_arguments, torch_name


def decompositions_on_950() -> dict[Any, Callable[..., Any]]:
    """Return op -> decomposition for the ops that others serve; each declines other products."""
    return {_torch_op(ge_type): _decomposition(ge_type) for ge_type in SERVED_TYPES}


def _torch_op(ge_type: str) -> Any:
    return getattr(torch.ops.moe_graph, torch_name(ge_type)).default


def _decomposition(ge_type: str) -> Callable[..., Any]:
    opdef = find(ge_type)
    assert opdef is not None

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if current_product() is not Soc.ASCEND950:
            return NotImplemented
        inputs, attrs = ir_arguments(opdef, args, kwargs)
        served = served_by(ge_type, inputs, attrs)
        by_name = {each.name: value for each, value in zip(opdef.inputs, inputs, strict=True)}
        arguments = [
            None if source is None else source.prepare(by_name[source.name])
            for source in served.inputs
        ]
        results = _torch_op(served.ge_type)(*arguments, **served.attrs)
        results = results if isinstance(results, tuple) else (results,)
        outputs = [
            _absent(opdef, index, arguments) if at is None else results[at]
            for index, at in enumerate(served.outputs)
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return decompose


def _absent(opdef: OpDef, index: int, arguments: list[Tensor | None]) -> Tensor:
    like = arguments[0]
    assert like is not None
    return like.new_empty((0,), dtype=opdef.outputs[index].dtype)
