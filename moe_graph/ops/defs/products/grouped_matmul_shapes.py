"""Shapes of x, weight, bias, group_list and y of GroupedMatmul, for each ``group_type``.

These rules hold for non-quantised products, and for all products on A2 and A3; what Ascend 950 asks
of quantised ones stands in `grouped_matmul_on_950.py`.
"""

from __future__ import annotations

from moe_graph.config import Soc
from moe_graph.ops.defs.products.group_lists import INNER, ROWS, SPARSE, UNGROUPED
from moe_graph.ops.defs.products.grouped_matmul_dtypes import y_dtype
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown, known_less
from moe_graph.ops.opdef import Call, Specs, TensorSpec, show_shape

X_RANKS = (2, 6)


def shapes(op: Call) -> Specs:
    """Check the shapes that the group_type links, and return the specs of y."""
    group_type = op.expect_one_of("group_type", (UNGROUPED, ROWS, INNER))
    rules = {UNGROUPED: _ungrouped, ROWS: _rows, INNER: _inner}
    specs = rules[group_type](op)
    check_bias(op)
    return specs


def _ungrouped(op: Call) -> Specs:
    expect_split_item(op, (0, 1))
    expect_no_transposed_x(op)
    if op.group_list is not None:
        raise op.error("group_list", got="a tensor", want="nothing for group_type -1")
    expect_length(op, "x", len(op.weight))
    specs: Specs = []
    for x, weight in zip(op.x, op.weight, strict=True):
        if not X_RANKS[0] <= len(x.shape) <= X_RANKS[1]:
            raise op.error("x", got=f"shape {show_shape(x.shape)}", want="2 to 6 dimensions")
        *rows, inner = x.shape
        weight_inner, columns = _weight_matrix(op, weight)
        op.expect_equal("weight", weight_inner, inner, "inner dim")
        specs.append(TensorSpec((*rows, columns), y_dtype(op)))
    return specs


def _rows(op: Call) -> Specs:
    expect_split_item(op, (2, 3))
    expect_no_transposed_x(op)
    rows: Dim = 0
    for x in op.x:
        part, _ = matrix(op, "x", x)
        rows = UNKNOWN if is_unknown(part) or is_unknown(rows) else rows + part
    groups, weights = _weights(op)
    if len(op.x) > 1:
        expect_length(op, "x", len(op.weight))
    if op.group_list is None:
        if len(op.x) == 1:
            raise op.error("group_list", got="nothing", want="a tensor for one x and group_type 0")
    else:
        op.expect_equal("group_list", list_length(op), groups, "dim 0")
    for x in op.x:
        inner = x.shape[1]
        for weight_inner, _ in weights:
            op.expect_equal("weight", weight_inner, inner, "inner dim")
    columns = weights[0][1]
    for _, other in weights:
        op.expect_equal("weight", other, columns, "columns")
    return [TensorSpec((rows, columns), y_dtype(op))]


def _inner(op: Call) -> Specs:
    several = len(op.weight) > 1
    expect_split_item(op, (0, 1) if several else (2, 3))
    expect_length(op, "x", 1)
    for name, wanted in (("transpose_x", True), ("transpose_weight", False)):
        if getattr(op, name) is not wanted:
            raise op.error(name, got=not wanted, want=f"{wanted} for group_type 2")
    if op.bias:
        raise op.error("bias", got="a tensor", want="nothing for group_type 2")
    if several:
        return _inner_of_lists(op)
    if op.group_list is None:
        raise op.error("group_list", got="nothing", want="a tensor for group_type 2")
    groups = list_length(op)
    inner, rows = matrix(op, "x", op.x[0])
    weight_inner, columns = matrix(op, "weight", op.weight[0])
    op.expect_equal("weight", weight_inner, inner, "dim 0")
    return [TensorSpec((groups, rows, columns), y_dtype(op))]


def _inner_of_lists(op: Call) -> Specs:
    """Weights one below the other share the rows of x; what follows the last is not read."""
    if op.group_list is not None and op.soc is not Soc.ASCEND950:
        raise op.error("group_list", got="a tensor", want="nothing beside a list of weights")
    inner, rows = matrix(op, "x", op.x[0])
    total: Dim = 0
    specs: Specs = []
    for weight in op.weight:
        part, columns = matrix(op, "weight", weight)
        total = UNKNOWN if is_unknown(part) or is_unknown(total) else total + part
        specs.append(TensorSpec((rows, columns), y_dtype(op)))
    if known_less(inner, total):
        raise op.error("weight", got=f"{total} rows in all", want=f"<= {inner}, those of x")
    return specs


def matrix(op: Call, argument: str, spec: TensorSpec) -> tuple[Dim, Dim]:
    """Return the two dims of a matrix."""
    if len(spec.shape) != 2:
        raise op.error(argument, got=f"shape {show_shape(spec.shape)}", want="2 dimensions")
    return spec.shape[0], spec.shape[1]


def _weight_matrix(op: Call, spec: TensorSpec) -> tuple[Dim, Dim]:
    """Return (inner, columns) of a 2-D weight."""
    first, second = matrix(op, "weight", spec)
    return (second, first) if op.transpose_weight else (first, second)


def _weights(op: Call) -> tuple[Dim, list[tuple[Dim, Dim]]]:
    """Return the number of groups and (inner, columns) of each weight tensor."""
    if len(op.weight) > 1 or len(op.x) > 1:
        return len(op.weight), [_weight_matrix(op, weight) for weight in op.weight]
    (weight,) = op.weight
    if len(weight.shape) != 3:
        raise op.error("weight", got=f"shape {show_shape(weight.shape)}", want="3 dimensions")
    groups, first, second = weight.shape
    return groups, [(second, first) if op.transpose_weight else (first, second)]


def inner_and_columns(op: Call, weight: TensorSpec) -> tuple[Dim, Dim]:
    """Return K and N of one weight, stacked or not."""
    first, second = weight.shape[-2:]
    return (second, first) if op.transpose_weight else (first, second)


def list_length(op: Call) -> Dim:
    """Return how many groups ``group_list`` has: ``[G]``, or ``[G, 2]`` of index and size."""
    if op.group_list_type == SPARSE:
        groups, pair = op.dims("group_list", rank=2)
        op.expect_equal("group_list", pair, 2, "dim 1")
        return groups
    (groups,) = op.dims("group_list", rank=1)
    return groups


def expect_split_item(op: Call, allowed: tuple[int, int]) -> None:
    """Raise unless y is given as this group_type has it: one tensor (2, 3) or a list (0, 1)."""
    if op.split_item not in allowed:
        raise op.error(
            "split_item",
            got=op.split_item,
            want=f"{allowed[0]} or {allowed[1]} for group_type {op.group_type}",
        )


def expect_no_transposed_x(op: Call) -> None:
    """Raise when x is transposed."""
    if op.transpose_x:
        raise op.error("transpose_x", got=True, want=f"False for group_type {op.group_type}")


def expect_length(op: Call, argument: str, length: int) -> None:
    """Raise unless the list has this many tensors."""
    tensors = getattr(op, argument)
    if len(tensors) != length:
        raise op.error(argument, got=f"{len(tensors)} tensors", want=length)


def check_bias(op: Call) -> None:
    """Bias is one ``[G, N]`` beside one weight, and G of ``[N]`` beside G weights."""
    if op.bias:
        check_per_column(op, "bias")


def check_per_column(op: Call, name: str) -> None:
    """Raise unless a list is ``[G, N]`` beside one stacked weight, or ``[N]`` beside each."""
    tensors = getattr(op, name)
    expect_length(op, name, len(op.weight))
    for tensor, weight in zip(tensors, op.weight, strict=True):
        columns = inner_and_columns(op, weight)[1]
        wanted = (weight.shape[0], columns) if len(weight.shape) == 3 else (columns,)
        expect_shape(op, name, tensor, wanted)


def expect_shape(op: Call, name: str, tensor: TensorSpec, wanted: tuple[Dim, ...]) -> None:
    """Raise unless a tensor has, or may have, this shape."""
    if len(tensor.shape) != len(wanted):
        raise op.error(name, got=f"shape {show_shape(tensor.shape)}", want=show_shape(wanted))
    for position, (got, want) in enumerate(zip(tensor.shape, wanted, strict=True)):
        op.expect_equal(name, got, want, f"dim {position}")


def fits(tensor: TensorSpec, wanted: tuple[Dim, ...]) -> bool:
    """True when a tensor is known to have this shape, or of unknown dims could have."""
    return len(tensor.shape) == len(wanted) and all(
        is_unknown(got) or is_unknown(want) or bool(got == want)
        for got, want in zip(tensor.shape, wanted, strict=True)
    )
