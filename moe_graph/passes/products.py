"""Products per expert: what multiplies the rows, and the bias that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import Joined, PerExpert, SlotProduct


@dataclass(frozen=True, eq=False)
class Product:
    """A product per expert, with the bias that follows it directly.

    Attributes:
        node: the product.
        rows: what it multiplies, or the tokens that its rows are copies of.
        of_tokens: `rows` are tokens.
        weight: weights ``[E, H, N]``, or ``[E, N, H]`` when `transposed`.
        transposed: the product reads the last two dimensions swapped.
        result: `node`, or the last of the reshapes that alone read it.
        bias: table ``[E, N]``, or None.
        biased: the addition of the bias to `result`, or None.
    """

    node: Node
    rows: Node
    of_tokens: bool
    weight: Node
    transposed: bool
    result: Node
    bias: Node | None = None
    biased: Node | None = None


def product_of(facts: Facts, node: Node) -> Product:
    """Return a product with the bias by expert that is added to it directly, if one is."""
    fact, call = facts.given[node], facts.calls[node]
    if isinstance(fact, SlotProduct):
        rows = fact.tokens or _matrix_behind(facts, fact.rows, node)
        of_tokens, table, transposed = fact.tokens is not None, fact.weights.table, fact.transposed
    else:
        rows, of_tokens = call["input"], False
        table, transposed = untransposed(facts, call["weight"])
    results = list(_reshaped(facts, node))
    for result in results:
        for user in result.users:
            bias = _bias_added(facts, result, user)
            if bias is not None:
                return Product(node, rows, of_tokens, table, transposed, result, bias, user)
    matrix = next((result for result in results if len(meta.shape(result)) == 2), node)
    return Product(node, rows, of_tokens, table, transposed, matrix)


def experts_of(facts: Facts, node: Node) -> meta.Dim:
    """Return how many experts the weights of a product have."""
    fact = facts.given[node]
    if isinstance(fact, Joined):
        return len(fact.parts)
    table = fact.weights.table if isinstance(fact, SlotProduct) else facts.calls[node]["weight"]
    return meta.shape(table)[0]


def _matrix_behind(facts: Facts, rows: Node, reader: Node) -> Node:
    """Return the matrix that `rows` is a reshape of where that is the same at `reader`."""
    call = facts.calls[rows]
    if call.op != "reshape" or call.writes is not None or len(meta.shape(call["input"])) != 2:
        return rows
    span = facts.position[rows], facts.position[reader]
    written = facts.memory.written_between(rows, *span)
    return rows if written is not None else call["input"]


def _reshaped(facts: Facts, node: Node) -> Iterator[Node]:
    """Yield a node and the reshapes of it, as long as nothing else reads what they start from."""
    yield node
    while len(node.users) == 1:
        (node,) = node.users
        if facts.calls[node].op != "reshape":
            return
        yield node


def _bias_added(facts: Facts, product: Node, user: Node) -> Node | None:
    """Return the table of the bias by expert that `user` adds to a product and to nothing else."""
    add = facts.calls[user]
    if add.op != "add" or add["alpha"] != 1 or add["input"] is not product:
        return None
    bias = facts.given.get(add["other"]) if isinstance(add["other"], Node) else None
    if not isinstance(bias, PerExpert) or add["other"] is not bias.leaf:
        return None
    return bias.table if _adds_directly(facts, add, bias) else None


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


def untransposed(facts: Facts, weight: Node) -> tuple[Node, bool]:
    """Return the weight behind a view that swaps its two last dimensions."""
    call = facts.calls[weight]
    return (call["input"], True) if swaps_last_dims(call) else (weight, False)


def swaps_last_dims(call: Call) -> bool:
    """Tell whether a call is a view that swaps the two last dimensions and no others."""
    if call.op != "permute" or call.writes is not None:
        return False
    swapped, view = meta.example(call["input"]).transpose(-2, -1), meta.example(call.node)
    same = meta.same_shape(tuple(view.shape), tuple(swapped.shape))
    return same and view.stride() == swapped.stride()
