"""Layers out of facts: a dispatch, a row-wise body with products per expert, a combine, one root.

A :class:`Layer` lists what the rewrite puts other nodes in place of; everything else about the
layer (body, router, shared experts) stays as it is. A layer that fails a check becomes the
:class:`~moe_graph.passes.misses.Miss` of that check. Ids that reach products per expert but no
combine are kept with the check that failed last; anything with no such product is no MoE layer, and
nothing is said about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import (
    AboutRoot,
    Combined,
    Ends,
    ExpertIds,
    Order,
    PerExpert,
    PerSlot,
    Root,
    Rows,
    RowWise,
    Unpermuted,
)
from moe_graph.passes.gates import swiglu_input
from moe_graph.passes.misses import Miss
from moe_graph.passes.region import body_of, falls_away, outside_users


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


@dataclass(frozen=True, eq=False)
class Layer:
    """A proved MoE layer in sorted-grouped form.

    Attributes:
        order: the permutation that all of it is about.
        experts: number of experts of the weights.
        dispatches: gathers of rows, in graph order.
        products: products per expert, in graph order.
        gates: multiplication -> product that it gates as SwiGlu does.
        per_slot: gathers of values per slot that the body reads.
        sorted_ids: node of ids in the order of the rows -> gathers by it that the body reads.
        rows: the rows that are combined, before the weights.
        weights: one weight per slot, in slot order and of any shape; None for a plain sum.
        end: node that yields the sum.
        body: row-wise nodes that stay.
        dead: nodes that fall away.
    """

    order: Order
    experts: int
    dispatches: list[Node]
    products: list[Product]
    gates: dict[Node, Node]
    per_slot: list[Node]
    sorted_ids: dict[Node, list[Node]]
    rows: Node
    weights: Node | None
    end: Node
    body: set[Node]
    dead: set[Node]

    @property
    def root(self) -> Root:
        """The expert ids that all of it is about."""
        return self.order.root


def find_layers(graph: Graph, facts: Facts) -> list[Layer | Miss]:
    """Return the layers of a graph, and a miss for each that must stay as it is, in graph order."""
    found: list[tuple[int, Layer | Miss]] = []
    settled: set[Root] = set()
    for node in graph.nodes:
        fact = facts.given.get(node)
        if isinstance(fact, Combined) and fact.body.products and _is_last(facts, node):
            found.append((facts.position[node], _layer(facts, node, fact)))
            settled.add(fact.root)
    for root, product in _roots_of_products(graph, facts).items():
        if root not in settled:
            found.append((facts.position[product], _nearest_miss(facts, root, product)))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def _is_last(facts: Facts, node: Node) -> bool:
    return not any(isinstance(facts.given.get(user), Combined) for user in node.users)


def _layer(facts: Facts, node: Node, combine: Combined) -> Layer | Miss:
    order, root = combine.body.order, combine.root
    body = body_of(facts, combine.rows, combine.body.leaves)
    by_position = sorted(combine.body.leaves, key=facts.position.__getitem__)
    dispatches = [leaf for leaf in by_position if isinstance(facts.given[leaf], Rows)]
    products = [_product(facts, n) for n in sorted(combine.body.products, key=facts.position.get)]  # type: ignore[arg-type]
    experts = {meta.shape(facts.calls[p.node]["weight"])[0] for p in products}
    miss = _check(facts, node, combine, dispatches, products, experts)
    if miss is not None:
        return miss
    node = _end(facts, node, combine.rows)
    weights = _weights_before_reshape(facts, combine, node)
    gates = {n: source for n in body if (source := swiglu_input(facts, n)) in body}
    replaced = {node, *dispatches, *gates}
    replaced |= {n for p in products for n in (p.node, p.biased) if n is not None}
    per_slot = [leaf for leaf in by_position if isinstance(facts.given[leaf], PerSlot)]
    needed = _operands(facts, products, gates, [*dispatches, *per_slot])
    needed |= {n for n in (root.ids, combine.rows, weights) if n is not None}
    dead = falls_away(facts, replaced, needed)
    sorted_ids = _readers_of_ids(facts, body - dead)
    per_slot = [leaf for leaf in per_slot if leaf not in dead]
    dead = falls_away(facts, {*replaced, *per_slot, *sorted_ids}, needed)
    outside = outside_users(facts, order, body | dead)
    if outside and not order.stable:
        return Miss(
            "interior-user",
            outside[0],
            root,
            lambda: f"{outside[0].name} reads a value in the order of an unstable sort",
            "no other use of values inside the layer",
            "sort with stable=True, or compute the value from the router's ids",
        )
    return Layer(
        order,
        experts.pop(),
        dispatches,
        products,
        gates,
        per_slot,
        sorted_ids,
        combine.rows,
        weights,
        node,
        body - dead,
        dead,
    )


def _end(facts: Facts, total: Node, rows: Node) -> Node:
    """Return the cast that takes the sum back to the dtype of the rows, or else the sum."""
    users = list(total.users)
    if len(users) != 1 or not meta.is_tensor(users[0]):
        return total
    cast = facts.calls[users[0]]
    returns = cast.op == "cast" and cast.known and meta.dtype(cast.node) == meta.dtype(rows)
    return cast.node if returns and facts.grad[cast.node] == facts.grad[total] else total


def _check(
    facts: Facts,
    node: Node,
    combine: Combined,
    dispatches: list[Node],
    products: list[Product],
    experts: set[object],
) -> Miss | None:
    """Return the first check of a whole layer that fails."""
    root, maker = combine.root, combine.body.order.maker
    late = dispatches and facts.position[dispatches[0]] > facts.position[products[0].node]
    if not dispatches or late:
        return Miss("dispatch", node, root, "products of no token's rows", "rows of the tokens")
    if root.bound is None:
        return Miss(
            "expert-ids-bound",
            root.ids,
            root,
            lambda: f"ids of unknown range ({root.ids.name})",
            "ids from a top-k or argmax over the experts in the same graph",
            "compile the router together with the experts",
        )
    if len(experts) != 1 or not isinstance(next(iter(experts)), int):
        return Miss("experts", node, root, lambda: f"weights of {experts} experts", "one number")
    (count,) = experts
    if root.bound > count:  # type: ignore[operator]
        return Miss(
            "experts",
            products[0].node,
            root,
            lambda: f"ids below {root.bound} for weights of {count} experts",
            "a router over as many experts as there are weights",
        )
    grads = {facts.grad[n] for n in (node, *dispatches, *(p.node for p in products))}
    if len(grads) > 1:
        return Miss("grad-mode", node, root, "gradients switched within the layer", "one grad mode")
    first = min(facts.position[n] for n in combine.body.leaves)
    reads = [(root.ids, facts.position[maker], first)]
    if combine.weight_source is not None and combine.read_at is not None:
        reads.append((combine.weight_source, facts.position[combine.read_at], facts.position[node]))
    for value, start, end in reads:
        written = facts.memory.written_between(value, start, end)
        if written is not None:
            return Miss(
                "in-place-write",
                written,
                root,
                lambda value=value: f"{value.name} is written inside the layer",
                "ids and weights that stay as the router made them",
            )
    return None


def _operands(
    facts: Facts, products: list[Product], gates: dict[Node, Node], gathers: list[Node]
) -> set[Node]:
    """Return what the new products, gates and gathers read."""
    operands = {facts.calls[p.node]["input"] for p in products}
    operands |= {p.weight for p in products} | {p.bias for p in products if p.bias is not None}
    operands |= set(gates.values())
    for gather in gathers:
        fact = facts.given[gather]
        if isinstance(fact, Rows | PerSlot):
            operands.add(fact.source)
    return operands


def _weights_before_reshape(facts: Facts, combine: Combined, end: Node) -> Node | None:
    """Return the weights ``[T, K]`` behind the reshape that flattened them, where that is safe."""
    weights = combine.weight_source
    call = facts.calls[weights] if weights is not None else None
    if weights is None or call is None or call.op != "reshape" or call.writes is not None:
        return weights
    table, root = call["input"], combine.root
    if not meta.same_shape(meta.shape(table), (root.tokens, root.top_k)):
        return weights
    span = facts.position[weights], facts.position[end]
    return weights if facts.memory.written_between(table, *span) is not None else table


def _product(facts: Facts, node: Node) -> Product:
    """Return a product with the bias by expert that is added to it directly, if one is."""
    weight, transposed = _untransposed(facts, facts.calls[node]["weight"])
    for user in node.users:
        add = facts.calls[user]
        if add.op != "add" or add["alpha"] != 1 or add["input"] is not node:
            continue
        bias = facts.given.get(add["other"]) if isinstance(add["other"], Node) else None
        by_expert = isinstance(bias, PerExpert) and add["other"] is bias.leaf
        if by_expert and _adds_directly(facts, add, bias):
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


def _readers_of_ids(facts: Facts, body: set[Node]) -> dict[Node, list[Node]]:
    """Return the nodes of ids in the order of the rows that the remaining body reads."""
    readers: dict[Node, list[Node]] = {}
    for leaf in body:
        for source in leaf.all_input_nodes:
            fact = facts.given.get(source)
            if isinstance(fact, ExpertIds) and fact.order is not None:
                readers.setdefault(source, []).append(leaf)
    return readers


def _roots_of_products(graph: Graph, facts: Facts) -> dict[Root, Node]:
    """Return the ids that reach a product per expert, with the first such product."""
    roots: dict[Root, Node] = {}
    for node in graph.nodes:
        call = facts.calls[node]
        if call.op != "grouped_mm":
            continue
        root = _root_of(facts, call["input"]) or _root_of(facts, call["offs"])
        if root is not None:
            roots.setdefault(root, node)
    return roots


def _root_of(facts: Facts, value: object) -> Root | None:
    if not isinstance(value, Node):
        return None
    fact, cause = facts.given.get(value), facts.cause(value)
    if isinstance(fact, RowWise | Rows | Ends | Unpermuted):
        return fact.root
    return cause.root if cause is not None else None


def _nearest_miss(facts: Facts, root: Root, product: Node) -> Miss:
    """Return the failed check that came closest to a layer."""
    misses = [miss for miss in facts.misses if miss.root is root]
    if misses:
        return max(misses, key=lambda miss: facts.position[miss.node])
    last = max(
        (n for n, fact in facts.given.items() if isinstance(fact, AboutRoot) and fact.root is root),
        key=facts.position.__getitem__,
    )
    user = next((user for user in last.users if user not in facts.given), last)
    return Miss(
        "combine",
        user,
        root,
        lambda: f"{facts.calls[user].op} of {last.name} ({type(facts.given[last]).__name__})",
        "rows put back by the inverse permutation and summed over top_k, or added by token",
    )
