"""Products per expert: what multiplies the rows, and the bias that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import PerExpert


@dataclass(frozen=True, eq=False)
class Product:
    """A product per expert, with the bias that follows it directly.

    Attributes:
        node: the product.
        weight: weights ``[E, H, N]``, or ``[E, N, H]`` when `transposed`.
        transposed: the product reads the last two dimensions swapped.
        bias: table ``[E, N]``, or None.
        biased: the addition of the bias, or None.
    """

    node: Node
    weight: Node
    transposed: bool
    bias: Node | None = None
    biased: Node | None = None


def product_of(facts: Facts, node: Node) -> Product:
    """Return a product with the bias by expert that is added to it directly, if one is."""
    weight, transposed = _untransposed(facts, facts.calls[node]["weight"])
    for user in node.users:
        add = facts.calls[user]
        if add.op != "add" or add["alpha"] != 1 or add["input"] is not node:
            continue
        bias = facts.given.get(add["other"]) if isinstance(add["other"], Node) else None
        if not isinstance(bias, PerExpert) or add["other"] is not bias.leaf:
            continue
        if _adds_directly(facts, add, bias):
            return Product(node, weight, transposed, bias.table, user)
    return Product(node, weight, transposed)


def _adds_directly(facts: Facts, add: Call, bias: PerExpert) -> bool:
    """Tell whether nothing sees the product without the bias, and the bias is still the same."""
    product, position = add["input"], facts.position
    others = [user for user in product.users if user is not add.node]
    if add.writes is product:
        hidden = all(position[user] > position[add.node] for user in others)
    else:
        hidden = not others and meta.dtype(add.node) == meta.dtype(product)
    start, end = sorted((position[bias.leaf], position[product]))
    unwritten = facts.memory.written_between(bias.table, start, end) is None
    return hidden and unwritten and meta.same_shape(meta.shape(bias.leaf), meta.shape(product))


def _untransposed(facts: Facts, weight: Node) -> tuple[Node, bool]:
    """Return the weight behind a view that swaps its two last dimensions."""
    call = facts.calls[weight]
    if call.op != "permute" or call.writes is not None:
        return weight, False
    source: Node = call["input"]
    swapped, view = meta.example(source).transpose(-2, -1), meta.example(weight)
    same = meta.same_shape(tuple(view.shape), tuple(swapped.shape))
    return (source, True) if same and view.stride() == swapped.stride() else (weight, False)
