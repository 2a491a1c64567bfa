"""``moe_graph::grouped_matmul_single``: GroupedMatmul of one x and one weight, with gradient.

    grouped_matmul_single(x [R, K], weight [G, K, N], bias [G, N]?, group_list [G]) -> y [R, N]

is GroupedMatmul with ``split_item=3``; with ``group_type=2`` and ``transpose_x=True`` it takes
``x [R, K], weight [R, N]`` to ``y [G, K, N]``, which is the weight gradient of the former. The two
are closed under differentiation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.ops.defs.products.group_lists import INNER, ROWS
from moe_graph.ops.defs.products.grouped_matmul import OPDEF
from moe_graph.ops.opdef import Autograd
from moe_graph.ops.torch_binding import define

NAME = "grouped_matmul_single"
SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor group_list, bool transpose_weight=False, "
    "bool transpose_x=False, int group_type=0, int group_list_type=0) -> Tensor"
)
_NAMES = (
    "x",
    "weight",
    "bias",
    "group_list",
    "transpose_weight",
    "transpose_x",
    "group_type",
    "group_list_type",
)
_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "transpose_weight": False,
    "transpose_x": False,
    "group_type": 0,
    "group_list_type": 0,
}


def ir_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the IR inputs and attributes of GroupedMatmul for arguments of the torch op."""
    given = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | kwargs
    bias = [] if given["bias"] is None else [given["bias"]]
    inputs = [[given["x"]], [given["weight"]], bias, [], [], [], [], given["group_list"], None]
    attrs = {name: given[name] for name in _NAMES[4:]}
    return inputs, OPDEF.bind_attrs(attrs | {"split_item": 3})


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(op.x, op.weight, op.bias, op.group_list)
    ctx.transpose_weight = op.transpose_weight
    ctx.group_type = op.group_type
    ctx.group_list_type = op.group_list_type


def _backward(ctx: Any, grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
    x, weight, bias, group_list = ctx.saved_tensors

    def by_rows(rows: torch.Tensor, per_group: torch.Tensor, transpose: bool) -> torch.Tensor:
        y: torch.Tensor = torch.ops.moe_graph.grouped_matmul_single(
            rows, per_group, None, group_list, transpose, False, ROWS, ctx.group_list_type
        )
        return y

    def by_inner(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.moe_graph.grouped_matmul_single(
            left, right, None, group_list, False, True, INNER, ctx.group_list_type
        )
        return y

    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grads: dict[str, torch.Tensor | None] = {}
    if ctx.group_type == INNER:
        if needs_x:
            grads["x"] = by_rows(weight, grad, True)
        if needs_weight:
            grads["weight"] = by_rows(x, grad, False)
        return grads
    if needs_x:
        grads["x"] = by_rows(grad, weight, not ctx.transpose_weight)
    if needs_weight:
        grads["weight"] = by_inner(grad, x) if ctx.transpose_weight else by_inner(x, grad)
    if bias is not None and needs_bias:
        # A column of ones turns the sum over the rows of a group into a grouped product.
        wide = grad.to(bias.dtype)
        ones = wide.new_ones((wide.shape[0], 1))
        grads["bias"] = by_inner(ones, wide).squeeze(1)
    return grads


def bind_single() -> Any:
    """Define the torch op and return it."""
    return define(NAME, SCHEMA, OPDEF, ir_arguments, Autograd(_save, _backward))
