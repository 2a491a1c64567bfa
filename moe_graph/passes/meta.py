"""Shapes and dtypes of FX nodes, read from what tracing left on them.

Dynamo graphs carry ``meta["example_value"]``, ATen graphs ``meta["val"]``; both hold fake tensors
or symbolic ints. Dimensions are compared without ever adding a guard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Dim = int | torch.SymInt


def example(value: Any) -> Any:
    """Return what `value` holds while tracing: the meta value of a node, anything else as it is."""
    if not isinstance(value, Node):
        return value
    return value.meta.get("example_value", value.meta.get("val"))


def is_tensor(value: Any) -> bool:
    """Tell whether `value` is a node that yields one tensor."""
    return isinstance(value, Node) and isinstance(example(value), torch.Tensor)


def shape(node: Node) -> tuple[Dim, ...]:
    """Return the dimensions of a tensor node."""
    return tuple(example(node).shape)


def dtype(node: Node) -> torch.dtype:
    """Return the dtype of a tensor node."""
    tensor_dtype: torch.dtype = example(node).dtype
    return tensor_dtype


def is_integer(node: Node) -> bool:
    """Tell whether a tensor node holds whole numbers other than bool."""
    kind = dtype(node)
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def same_dim(left: Any, right: Any) -> bool:
    """Tell whether two dimensions are known to be equal, adding no guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if not isinstance(left, int | torch.SymInt) or not isinstance(right, int | torch.SymInt):
        return False
    return bool(statically_known_true(left == right))


def same_shape(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Tell whether two shapes are known to be equal, adding no guard."""
    return len(left) == len(right) and all(map(same_dim, left, right))


def product(dims: tuple[Dim, ...]) -> Dim:
    """Multiply dimensions."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def wrap_dim(dim: Any, rank: int) -> int | None:
    """Return `dim` counted from the front, None when it is not a literal dimension."""
    if not isinstance(dim, int) or not -rank <= dim < max(rank, 1):
        return None
    return dim % rank if rank else 0
