"""Arithmetic of GroupedMatmul: ``torch.mm`` into slices of the output, side by side.

Weights are transposed as views and inputs are never copied, except where a bias must be added
before the only rounding of a 16-bit product.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from moe_graph.ops.defs.products.group_lists import COUNT, INNER, ROWS, group_ends
from moe_graph.ops.defs.products.grouped_matmul_dtypes import Kind, kind
from moe_graph.ops.defs.products.grouped_matmul_int8 import compute_int8, naive_int8
from moe_graph.ops.defs.support.chunks import slices
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Call, Tensors

_BLOCK_ROWS = 512
"""Rows of one product; more per block gain nothing, and one large group must not be one part."""


def compute(op: Call) -> Tensors:
    """Multiply; the shapes are those of `grouped_matmul_shapes.py`."""
    if kind(op) is not Kind.PLAIN:
        return compute_int8(op)
    if op.group_type == INNER:
        return _inner_of_lists(op) if len(op.weight) > 1 else [_inner(op)]
    if op.group_type == ROWS:
        return [_rows(op)]
    products = [
        x.new_empty((x.shape[0], _columns(op, op.weight[group]))) for group, x in enumerate(op.x)
    ]

    def work(group: int) -> None:
        weight = _oriented(op, op.weight[group])
        _product(op.x[group], weight, _bias(op, group), products[group])

    run_parts(work, range(len(products)))
    return list(products)


def _rows(op: Call) -> torch.Tensor:
    total = sum(x.shape[0] for x in op.x)
    y = op.new_output((total, _columns(op, op.weight[0])), op.x[0].dtype, op.x[0].device)
    ends = _ends(op, total) if op.group_list is not None else _ends_of_tensors(op)

    def work(part: tuple[int, int, slice]) -> None:
        group, begin, block = part
        x = op.x[group][block] if len(op.x) > 1 else op.x[0][begin:][block]
        weight = op.weight[0][group] if op.weight[0].dim() == 3 else op.weight[group]
        _product(x, _oriented(op, weight), _bias(op, group), y[begin:][block])

    begins = [0, *ends]
    run_parts(
        work,
        [
            (group, begin, block)
            for group, (begin, end) in enumerate(zip(begins, ends, strict=False))
            for block in slices(end - begin, _BLOCK_ROWS)
        ],
    )
    y[begins[-1] :].fill_(torch.nan)
    return y


def _inner(op: Call) -> torch.Tensor:
    (x,), (weight,) = op.x, op.weight
    ends = _ends(op, x.shape[0])
    y = op.new_output((len(ends), x.shape[1], weight.shape[1]), x.dtype, x.device)

    def work(part: tuple[int, int, int]) -> None:
        group, begin, end = part
        if end > begin:
            torch.mm(x[begin:end].t(), weight[begin:end], out=y[group])
        else:
            y[group].zero_()

    run_parts(work, list(zip(range(len(ends)), [0, *ends], ends, strict=False)))
    return y


def _inner_of_lists(op: Call) -> Tensors:
    (x,) = op.x
    ends = list(accumulate(weight.shape[0] for weight in op.weight))
    products = [x.new_empty((x.shape[1], weight.shape[1])) for weight in op.weight]

    def work(part: tuple[int, int, int]) -> None:
        group, begin, end = part
        torch.mm(x[begin:end].t(), op.weight[group], out=products[group])

    run_parts(work, list(zip(range(len(ends)), [0, *ends], ends, strict=False)))
    return list(products)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    elif x.dtype is torch.float32:
        torch.addmm(bias, x, weight, out=out)
    else:
        wide = torch.addmm(bias.to(torch.float32), x.to(torch.float32), weight.to(torch.float32))
        out.copy_(wide)


def _columns(op: Call, weight: torch.Tensor) -> int:
    return int(weight.shape[-2 if op.transpose_weight else -1])


def _oriented(op: Call, weight: torch.Tensor) -> torch.Tensor:
    return weight.t() if op.transpose_weight else weight


def _bias(op: Call, group: int) -> torch.Tensor | None:
    if not op.bias:
        return None
    bias: torch.Tensor = op.bias[0][group] if op.bias[0].dim() == 2 else op.bias[group]
    return bias


def _ends_of_tensors(op: Call) -> list[int]:
    ends: list[int] = []
    for x in op.x:
        ends.append((ends[-1] if ends else 0) + x.shape[0])
    return ends


def _ends(op: Call, rows: int) -> list[int]:
    """Return the end of each group, checked: ascending, within `rows`, and equal to x's if many."""
    ends = group_ends(op, rows)
    if len(op.x) > 1 and ends != (of_tensors := _ends_of_tensors(op)):
        raise op.error("group_list", got=f"ends {ends}", want=f"{of_tensors}, the rows of x")
    return ends


def naive(op: Call) -> Tensors:
    """The definition: every element of y is one fp32 dot product plus bias, rounded once."""
    if kind(op) is not Kind.PLAIN:
        return naive_int8(op)
    wide_x = [x.to(torch.float32) for x in op.x]
    weights = list(op.weight[0]) if op.weight[0].dim() == 3 else list(op.weight)
    if op.group_type == INNER and len(weights) > 1:
        sizes = [weight.shape[0] for weight in weights]
        rows_of = torch.split(wide_x[0][: sum(sizes)], sizes)
        products = [x.t() @ w.to(torch.float32) for x, w in zip(rows_of, weights, strict=True)]
        return [product.to(op.x[0].dtype) for product in products]
    if op.group_type == INNER:
        x, weight = wide_x[0], weights[0].to(torch.float32)
        sizes = _sizes(op)
        rows = sum(sizes)
        parts = zip(torch.split(x[:rows], sizes), torch.split(weight[:rows], sizes), strict=True)
        return [torch.stack([a.t() @ b for a, b in parts]).to(op.x[0].dtype)]
    wide = [(w.t() if op.transpose_weight else w).to(torch.float32) for w in weights]
    if op.group_type == ROWS:
        joined = torch.cat(wide_x)
        sizes = _sizes(op) if op.group_list is not None else [x.shape[0] for x in wide_x]
        wide_x = list(torch.split(joined[: sum(sizes)], sizes))
    products = []
    for group, (x, weight) in enumerate(zip(wide_x, wide, strict=True)):
        product = x @ weight
        if op.bias:
            product = product + (op.bias[0][group] if op.bias[0].dim() == 2 else op.bias[group])
        products.append(product.to(op.x[0].dtype))
    if op.group_type != ROWS:
        return list(products)
    y = torch.cat(products)
    unwritten = joined.shape[0] - y.shape[0]
    return [torch.cat([y, y.new_full((unwritten, y.shape[1]), torch.nan)])]


def _sizes(op: Call) -> list[int]:
    values: list[int] = op.group_list.tolist()
    if op.group_list_type == COUNT:
        return values
    return [end - begin for begin, end in zip([0, *values], values, strict=False)]
