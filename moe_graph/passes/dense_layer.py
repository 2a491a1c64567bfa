"""A proved MoE layer that computes every expert on every token, and the checks that prove it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.endings import Ending
from moe_graph.passes.facts import Root, ScatteredWeights
from moe_graph.passes.misses import Miss
from moe_graph.passes.products import untransposed
from moe_graph.passes.region import falls_away
from moe_graph.passes.side_facts import Dense, DenseSum, Gates, SparseLogits


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """All experts on all tokens, which the chosen experts alone can take the place of.

    Attributes:
        anchor: node that stands for it in the report: its first product.
        root: the expert ids.
        experts: number of experts.
        tokens: ``[T, H]`` that the experts compute from.
        steps: nodes from the tokens to `rows`, in graph order.
        products: product -> its rows, None for the tokens, the weights ``[E, ., .]``, and whether
            these are transposed.
        gates: what multiplies the tokens, by the node of that product.
        rows: what is summed over the experts, weighted or not.
        weights: what multiplies the rows in the sum, None where `gates` do or `rows` have it.
        ending: where the sum is.
        body: nodes that make the gates, which stay.
        dead: nodes that fall away.
    """

    anchor: Node
    root: Root
    experts: int
    tokens: Node
    steps: list[Node]
    products: dict[Node, tuple[Node | None, Node, bool]]
    rows: Node
    gates: Gates | None
    weights: Gates | None
    ending: Ending
    body: set[Node]
    dead: set[Node]
    form: str = "dense"


def dense_layer_of(facts: Facts, total: Node, fact: DenseSum) -> DenseLayer | Miss:
    """Return the layer that ends in `total`, or the check that it fails."""
    dense, root = fact.dense, fact.root
    steps = _steps(facts, fact.rows)
    anchor = min(dense.products, key=facts.position.__getitem__)
    products = {node: _product(facts, node) for node in dense.products}
    weights = fact.weights or dense.weights
    gates = [g for g in (dense.gates, weights) if g is not None]
    makers = {node for g in gates for node in _makers(facts, g.table)}
    read = {root.ids, dense.tokens, *(weight for _, weight, _ in products.values())}
    miss = _failed_check(facts, total, fact, gates, read)
    if miss is not None:
        return miss
    needed = read | {g.table for g in gates}
    dead = falls_away(facts, {total}, needed)
    alive = next((node for node in steps if node not in dead), None)
    if alive is not None:
        want = "no other use of the results of all experts"
        return Miss("interior-user", alive, root, f"{alive.name} stays in use", want)
    return DenseLayer(
        anchor,
        root,
        dense.experts,
        dense.tokens,
        steps,
        products,
        fact.rows,
        dense.gates,
        weights,
        Ending(total),
        makers - dead,
        dead,
    )


def _steps(facts: Facts, rows: Node) -> list[Node]:
    """Return the nodes that compute `rows` from the tokens, in graph order."""
    found: set[Node] = set()
    pending = [rows]
    while pending:
        node = pending.pop()
        if node not in found and isinstance(facts.given.get(node), Dense):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return sorted(found, key=facts.position.__getitem__)


def _product(facts: Facts, node: Node) -> tuple[Node | None, Node, bool]:
    """Return rows, weights and whether these are transposed, of a product with all experts."""
    call = facts.calls[node]
    if call.op != "einsum":
        weight = call["mat2"] if call.op == "bmm" else call["other"]
        return call["input"], *untransposed(facts, weight)
    left = str(call["equation"]).replace(" ", "").partition("->")[0]
    terms, operands = left.split(","), call["operands"]
    # The weights are the operand with a letter of their own in the result and the experts first.
    at = next(
        i
        for i in (0, 1)
        if not isinstance(facts.given.get(operands[i]), Dense) and len(terms[i]) == 3
    )
    rows, matrix = operands[1 - at], terms[at]
    of_tokens = not isinstance(facts.given.get(rows), Dense)
    shared = next(letter for letter in matrix[1:] if letter in terms[1 - at])
    return None if of_tokens else rows, operands[at], matrix[2] == shared


def _makers(facts: Facts, table: Node) -> set[Node]:
    """Return the nodes that make gates of weights and ids."""
    made: set[Node] = set()
    pending = [table]
    while pending:
        node = pending.pop()
        if node in made or not isinstance(
            facts.given.get(node), Gates | SparseLogits | ScatteredWeights
        ):
            continue
        made.add(node)
        call = facts.calls[node]
        if call.op == "scatter":
            made |= set(facts.memory.sharing(call["input"]))
        elif isinstance(call["input"], Node):
            pending.append(call["input"])
    return made


def _failed_check(
    facts: Facts, total: Node, fact: DenseSum, gates: list[Gates], read: set[Node]
) -> Miss | None:
    dense, root = fact.dense, fact.root
    if any(g.root is not root for g in gates):
        return Miss("dense-gate", total, root, "gates of two choices", "one choice of experts")
    if root.bound != dense.experts:
        got = f"ids below {root.bound}, weights of {dense.experts} experts"
        want = "a router over as many experts as there are weights"
        return Miss("experts", total, root, got, want)
    if not root.distinct or not meta.same_dim(meta.shape(dense.tokens)[0], root.tokens):
        return Miss("dispatch", total, root, "gates of other tokens", "gates of the same tokens")
    if root.top_k >= dense.experts:
        got = f"{root.top_k} of {dense.experts} experts per token"
        return Miss("dense-cost", total, root, got, "fewer experts per token than there are")
    nodes = [total, root.ids, dense.read_at, *dense.products, *(g.table for g in gates)]
    if len({facts.grad[node] for node in nodes}) > 1:
        return Miss("grad-mode", total, root, "gradients switched within it", "one grad mode")
    first, last = facts.position[dense.read_at], facts.position[total]
    for value in [*read, *(g.table for g in gates)]:
        start = min(first, facts.position[value]) if value is root.ids else facts.position[value]
        start = max(start, first) if value is dense.tokens else start
        written = facts.memory.written_between(value, start, last)
        if written is not None:
            got = f"{value.name} is written inside the layer"
            return Miss("in-place-write", written, root, got, "values that stay as they are")
    return None
