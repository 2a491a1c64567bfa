"""Arithmetic of GroupedMatmul for int8 x and int8 weight, groups of rows, one x and one weight.

    y = (x @ w + bias int32) * scale * per_token_scale             y bfloat16 or float16
    y = (x @ w) * scale * per_token_scale + bias                   the same, bias no int32
    y = x @ w + bias                                               y int32

The product is exact in int32; scales and a float bias apply in fp32, in this order, and y is
rounded once. Either scale is 1 where it is absent, and is per column (scale), per row
(per_token_scale) or per group. Nothing documents how a 64-bit scale, an activation, float8, float4
or int4 round on the device: these products are refused.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.products.group_lists import ROWS, SPARSE, group_ends
from moe_graph.ops.defs.products.grouped_matmul_dtypes import is_given, y_dtype
from moe_graph.ops.defs.support.chunks import slices
from moe_graph.ops.defs.support.poison import poison_
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.ir import dtype_name
from moe_graph.ops.opdef import Call, Tensors

_BLOCK_ROWS = 512


def compute_int8(op: Call) -> Tensors:
    """Multiply group by group; rows of y beyond the last group are poisoned."""
    check_computed(op)
    (x,), (weight,) = op.x, op.weight
    y = op.new_output((x.shape[0], _columns(op)), y_dtype(op), x.device)
    groups, ends = _groups(op)
    begins = [0, *ends]

    def work(part: tuple[int, slice]) -> None:
        position, rows = part
        group = groups[position]
        matrix = weight[group].t() if op.transpose_weight else weight[group]
        product = torch._int_mm(x[rows], matrix.contiguous())
        y[rows].copy_(_scaled(op, product, group, rows))

    run_parts(
        work,
        [
            (position, slice(begins[position] + block.start, begins[position] + block.stop))
            for position, end in enumerate(ends)
            for block in slices(end - begins[position], _BLOCK_ROWS)
        ],
    )
    poison_(y[begins[-1] :])
    return [y]


def check_computed(op: Call) -> None:
    """Raise for the quantised products that have shapes but no values here.

    Raises:
        OpError: names what is not computed.
    """
    for name in ("x", "weight"):
        dtype = getattr(op, name)[0].dtype
        if dtype is not torch.int8:
            raise _refused(op, name, dtype_name(dtype), "int8, or x and weight alike and float")
    if op.group_type != ROWS or len(op.x) != 1:
        raise _refused(op, "group_type", op.group_type, "0 with one x and one weight")
    if op.scale and op.scale[0].dtype not in (torch.float32, torch.bfloat16):
        raise _refused(op, "scale", dtype_name(op.scale[0].dtype), "float32 or bfloat16")
    if op.act_type:
        raise _refused(op, "act_type", op.act_type, 0)


def _refused(op: Call, argument: str, got: object, want: object) -> Exception:
    return op.error(
        argument,
        got=got,
        want=want,
        hint="other quantised products have shapes here but are not computed",
    )


def _groups(op: Call) -> tuple[list[int], list[int]]:
    """Return the index of each group, and where it ends."""
    rows = op.x[0].shape[0]
    ends = group_ends(op, rows)
    if op.group_list_type != SPARSE:
        return list(range(len(ends))), ends
    indices: list[int] = op.group_list[:, 0].tolist()
    groups = op.weight[0].shape[0]
    if sorted(indices) != list(range(groups)):
        raise op.error(
            "group_list", got=f"groups {indices}", want=f"each of 0 to {groups - 1} once"
        )
    return indices, ends


def _columns(op: Call) -> int:
    return int(op.weight[0].shape[-2 if op.transpose_weight else -1])


def _scaled(op: Call, product: torch.Tensor, group: int, rows: slice) -> torch.Tensor:
    """Return the rows of y that an int32 product gives, before the last rounding."""
    bias = op.bias[0][group] if op.bias else None
    if bias is not None and bias.dtype is torch.int32:
        product = product + bias
    if y_dtype(op) is torch.int32:
        return product
    wide = product.to(torch.float32)
    if op.scale:
        wide = wide * op.scale[0][group].to(torch.float32)
    if is_given(op.per_token_scale):
        wide = wide * _per_row(op, group, rows)
    if bias is not None and bias.dtype is not torch.int32:
        wide = wide + bias.to(torch.float32)
    return wide


def _per_row(op: Call, group: int, rows: slice) -> torch.Tensor:
    """Return the scale of each row ``[R, 1]``, or of the group; ``[M]`` means rows if G is M."""
    given: torch.Tensor = op.per_token_scale
    if tuple(given.shape) == (op.x[0].shape[0],):
        return given[rows].unsqueeze(1)
    return given[group]


def naive_int8(op: Call) -> Tensors:
    """The definition, in int64 and group by group."""
    check_computed(op)
    (x,), (weight,) = op.x, op.weight
    groups, ends = _groups(op)
    parts = []
    for group, begin, end in zip(groups, [0, *ends], ends, strict=False):
        matrix = weight[group].mT if op.transpose_weight else weight[group]
        product = x[begin:end].to(torch.int64) @ matrix.to(torch.int64)
        value = _scaled(op, product.to(torch.int32), group, slice(begin, end))
        parts.append(value.to(y_dtype(op)))
    unwritten = x.new_empty((x.shape[0] - ends[-1], _columns(op)), dtype=y_dtype(op))
    return [torch.cat([*parts, poison_(unwritten)])]
