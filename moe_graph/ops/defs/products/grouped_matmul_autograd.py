"""Gradient of GroupedMatmul with lists of tensors, where the groups are rows or there are none.

For ``y_i = x_i @ w_i + b_i``: ``dx_i = dy_i @ w_i^T``, ``dw_i = x_i^T @ dy_i`` and ``db_i`` is the
sum over the rows of ``dy_i``. Groups that share one x and one y stay grouped products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.ops.defs.products.group_lists import INNER, ROWS, UNGROUPED
from moe_graph.ops.opdef import Autograd

_EMPTY_LISTS = ("scale", "offset", "antiquant_scale", "antiquant_offset")
"""Inputs of quantised products: PyTorch wants a list for each list, also for an empty one."""

Grads = dict[str, Any]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.counts = (len(op.x), len(op.weight))
    ctx.save_for_backward(*op.x, *op.weight, *op.bias, op.group_list)
    ctx.transpose_weight = op.transpose_weight
    ctx.group_type = op.group_type
    ctx.group_list_type = op.group_list_type


def _backward(ctx: Any, grads: Sequence[torch.Tensor]) -> Grads:
    *tensors, group_list = ctx.saved_tensors
    of_x, of_weight = ctx.counts
    x, weight = tensors[:of_x], tensors[of_x : of_x + of_weight]
    bias = tensors[of_x + of_weight :]
    empty: Grads = {name: [] for name in _EMPTY_LISTS}
    if ctx.group_type == UNGROUPED:
        return empty | _ungrouped(ctx, x, weight, bias, grads)
    if ctx.group_type == ROWS and of_x == 1:
        return empty | _rows(ctx, x[0], weight, bias, group_list, grads[0])
    raise NotImplementedError(
        "moe_graph::grouped_matmul has no gradient for group_type "
        f"{ctx.group_type} with {of_x} tensors x: use grouped_matmul_single, or one x"
    )


def _ungrouped(
    ctx: Any,
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> Grads:
    pairs = list(zip(x, grads, strict=True))
    return {
        "x": _product(list(grads), list(weight), not ctx.transpose_weight, UNGROUPED),
        "weight": [
            torch.mm(grad.t(), rows) if ctx.transpose_weight else torch.mm(rows.t(), grad)
            for rows, grad in pairs
        ],
        "bias": [
            grad.sum(0, dtype=torch.float32).to(one.dtype)
            for one, grad in zip(bias, grads, strict=False)
        ],
    }


def _rows(
    ctx: Any,
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    group_list: torch.Tensor,
    grad: torch.Tensor,
) -> Grads:
    def by_inner(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.moe_graph.grouped_matmul_single(
            left, right, None, group_list, False, True, INNER, ctx.group_list_type
        )
        return y

    by_group = by_inner(grad, x) if ctx.transpose_weight else by_inner(x, grad)
    found: Grads = {
        "x": _product(
            [grad], list(weight), not ctx.transpose_weight, ROWS, group_list, ctx.group_list_type
        ),
        "weight": [by_group] if weight[0].dim() == 3 else list(by_group.unbind(0)),
        "bias": [],
    }
    if bias:
        # A column of ones turns the sum over the rows of a group into a grouped product.
        wide = grad.to(bias[0].dtype)
        sums = by_inner(wide.new_ones((wide.shape[0], 1)), wide).squeeze(1)
        found["bias"] = [sums] if bias[0].dim() == 2 else list(sums.unbind(0))
    return found


def _product(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    transpose_weight: bool,
    group_type: int,
    group_list: torch.Tensor | None = None,
    group_list_type: int = 0,
) -> list[torch.Tensor]:
    y: list[torch.Tensor] = torch.ops.moe_graph.grouped_matmul(
        x,
        weight,
        [],
        [],
        [],
        [],
        [],
        group_list,
        split_item=0 if group_type == UNGROUPED else 3,
        transpose_weight=transpose_weight,
        group_type=group_type,
        group_list_type=group_list_type,
    )
    return y


AUTOGRAD = Autograd(_save, _backward)
