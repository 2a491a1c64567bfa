"""Every expert on every token, and gates that are zero but at the experts that a router chose.

::

    full(-inf).scatter(1, ids, logits)            SparseLogits
    sparse.softmax(-1), sparse.sigmoid()          Gates
    zeros.scatter(1, ids, weights)                Gates
    x.repeat(E, 1), einsum("td,eid->tei", x, w)   Dense
    bmm(dense, w), silu(dense), dense * gates     Dense
    dense.sum(0), einsum("ted,te->td", y, gates)  DenseSum

A gate is taken for zero only where the graph makes it so: small is not enough. Gates before the
experts say nothing about their results unless everything on the way maps zero to zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule_of
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import AboutRoot, Axis, Fact, ScatteredWeights
from moe_graph.passes.facts_nonzero import nonzero_gates
from moe_graph.passes.misses import Miss
from moe_graph.passes.side_facts import Dense, DenseSum, Gates, SparseLogits
from moe_graph.passes.spellings import ELEMENTWISE

_BY_EXPERT = (Axis.EXPERT, Axis.TOKEN)
_BY_TOKEN = (Axis.TOKEN, Axis.EXPERT)
_PAIRS = (Axis.PAIR,)

_ZERO_TO_ZERO = {
    *("abs", "celu", "elu", "gelu", "hardswish", "leaky_relu", "mish", "mul", "neg", "relu"),
    *("relu6", "selu", "sign", "silu", "sin", "softsign", "square", "tanh", "tanhshrink"),
}
"""Elementwise ops of one or two values, all zero, that yield zero."""

_SEARCHED = 8
"""Nodes that are looked at for the router behind a gate that nothing is proved of."""


@rule_of(SparseLogits)
def _sparse_logits(call: Call, facts: Facts) -> Fact | None:
    fact = facts.aside(call["input"])
    if not isinstance(fact, SparseLogits) or call.writes is not None:
        return None
    if call.op == "cast" and meta.dtype(call.node).is_floating_point:
        return fact
    last = call.op == "softmax" and meta.wrap_dim(call["dim"], 2) == 1
    return Gates(fact.root, call.node) if last or call.op in ("sigmoid", "exp") else None


@rule_of(Gates, ScatteredWeights)
def _gates(call: Call, facts: Facts) -> Fact | Miss | None:
    if any(isinstance(facts.aside(node), Dense) for node in call.node.all_input_nodes):
        return _dense(call, facts)
    source = call.get("input")
    found = nonzero_gates(call, facts)
    if found is not None:
        return found
    gates = gates_of(facts, source)
    if gates is None or call.writes is not None or not meta.is_tensor(call.node):
        return None
    if call.op == "cast" and meta.dtype(call.node).is_floating_point:
        same = meta.dtype(call.node) == meta.dtype(call["input"])
        if same or gates.axes == _BY_TOKEN:
            return replace(gates, table=gates.table if same else call.node)
        return None
    old, new = meta.shape(call["input"]), meta.shape(call.node)
    if call.op == "permute" and gates.axes == _BY_TOKEN and len(old) == 2:
        return replace(gates, axes=_BY_EXPERT)
    if call.op != "reshape":
        return None
    axes = _axes_after_reshape(gates.axes, gates.root.bound, old, new)
    leads = axes is not None and all(meta.same_dim(dim, 1) for dim in new[len(axes) :])
    return replace(gates, axes=axes) if leads and axes is not None else None


def gates_of(facts: Facts, node: object) -> Gates | None:
    """Return a node as gates, None where nothing proves that it is zero elsewhere."""
    scattered, fact = facts.of(node), facts.aside(node)
    if isinstance(scattered, ScatteredWeights) and isinstance(node, Node):
        return Gates(scattered.root, node)
    return fact if isinstance(fact, Gates) else None


def tokens_for_experts(call: Call) -> Dense | None:
    """Return what ``x.repeat(E, 1)`` is."""
    if call.op != "repeat":
        return None
    times = [number for number in _numbers(call.node.args[1:]) if number != -1]
    old, new = meta.shape(call["input"]), meta.shape(call.node)
    if len(old) != 2 or len(new) != 2 or len(times) != 2 or times[1] != 1 or times[0] < 2:
        return None
    return Dense(_PAIRS, times[0], call["input"], call.node)


def _numbers(args: Any) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _numbers(arg)
        else:
            yield arg if isinstance(arg, int) else -1


def products_of_tokens(call: Call, facts: Facts, terms: Sequence[str], result: str) -> Dense | None:
    """Return what ``einsum("td,eid->tei", x, w)`` is: the product of each token at each expert."""
    at = 0 if len(terms[0]) == 2 else 1
    x, weight = call["operands"][at], call["operands"][1 - at]
    if any(facts.of(n) is not None or facts.aside(n) is not None for n in (x, weight)):
        return None
    token, matrix = terms[at], terms[1 - at]
    dims = meta.shape(weight) if meta.is_tensor(weight) else ()
    if len(token) != 2 or len(matrix) != 3 or len(set(token + matrix)) != 4 or len(dims) != 3:
        return None
    t, d, e = token[0], token[1], matrix[0]
    inner = matrix.replace(e, "").replace(d, "")
    if d not in matrix[1:] or not isinstance(dims[0], int):
        return None
    axes = {t + e + inner: _BY_TOKEN, e + t + inner: _BY_EXPERT}.get(result)
    products = frozenset([call.node])
    return Dense(axes, dims[0], x, call.node, products) if axes else None


@rule_of(Dense)
def _dense(call: Call, facts: Facts) -> Fact | Miss | None:
    if call.writes is not None:
        return None
    operands = [node for node in call.node.all_input_nodes if isinstance(facts.aside(node), Dense)]
    values = [fact for node in operands if isinstance(fact := facts.aside(node), Dense)]
    if not values or not all(_alike(values[0], other) for other in values[1:]):
        return None
    dense, others = values[0], [n for n in call.node.all_input_nodes if n not in operands]
    if call.op == "mul" and others:
        return _gated(call, facts, dense, operands[0])
    if call.op in ("bmm", "matmul"):
        return _product(call, facts, dense)
    if call.op == "einsum":
        return _einsum(call, facts, dense, operands)
    if call.op == "sum":
        return _sum(call, facts, dense)
    if others:
        return None
    products = frozenset().union(*(value.products for value in values))
    dense = replace(dense, products=products, zero=all(value.zero for value in values))
    if call.op in ELEMENTWISE:
        zero = dense.zero and call.op in _ZERO_TO_ZERO
        return replace(dense, zero=zero) if dense.weights is None else None
    if call.op in ("cast", "result"):
        return dense
    if call.op == "reshape":
        old = meta.shape(call["input"])
        axes = _axes_after_reshape(dense.axes, dense.experts, old, meta.shape(call.node))
        return replace(dense, axes=axes) if axes is not None else None
    return dense if _of_last_dim(call) else None


def _alike(one: Dense, other: Dense) -> bool:
    return (
        one.axes == other.axes
        and one.tokens is other.tokens
        and one.gates is other.gates
        and one.weights is other.weights
        and one.experts == other.experts
    )


def _of_last_dim(call: Call) -> bool:
    """Tell whether a call cuts the last dimension, spelled from the end."""
    if call.op in ("chunk", "split"):
        return bool(call["dim"] == -1)
    index: tuple[Any, ...] = call["index"] if call.op == "slice" else ()
    return len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)


def _axes_after_reshape(
    axes: tuple[Axis, ...], experts: int | None, old: tuple[Any, ...], new: tuple[Any, ...]
) -> tuple[Axis, ...] | None:
    """Return what the first dimensions count after a reshape that leaves the others in place."""
    lead = old[: len(axes)]
    # Of one token [E * T] is [E], and a dimension of length 1 behind it is T.
    split = axes == _PAIRS and len(new) > len(old) and new[0] == experts
    if split and meta.same_dim(old[0], new[0] * new[1]):
        return _BY_EXPERT
    if meta.same_shape(lead, new[: len(axes)]):
        return axes
    flat = axes == _BY_EXPERT and new and meta.same_dim(new[0], lead[0] * lead[1])
    return _PAIRS if flat else None


def _gated(call: Call, facts: Facts, dense: Dense, rows: Node) -> Fact | None:
    """Return what a product with gates is."""
    other = call["other"] if call["input"] is rows else call["input"]
    gates = gates_of(facts, other)
    if gates is None or dense.weights is not None:
        return None
    dims = meta.shape(other)
    # [E, T] of one token has the shape of [E * T, 1].
    one = gates.axes == _BY_EXPERT and dense.axes == _PAIRS and meta.same_dim(dims[1], 1)
    if not (one or gates.axes == dense.axes) or len(dims) != len(meta.shape(rows)):
        return None
    if dense.products:
        return replace(dense, weights=gates)
    return replace(dense, gates=gates, zero=True) if dense.gates is None else None


def _product(call: Call, facts: Facts, dense: Dense) -> Dense | None:
    weight = call["mat2"] if call.op == "bmm" else call["other"]
    if not isinstance(facts.aside(call["input"]), Dense) or facts.aside(weight) is not None:
        return None
    dims, rank = meta.shape(weight), len(meta.shape(call["input"]))
    fits = len(dims) == rank == 3 and dims[0] == dense.experts and dense.axes == _BY_EXPERT
    return _after(call, dense) if fits and dense.weights is None else None


def _after(call: Call, dense: Dense) -> Dense:
    return replace(dense, products=dense.products | {call.node})


def _einsum(call: Call, facts: Facts, dense: Dense, operands: list[Node]) -> Fact | Miss | None:
    left, _, result = str(call["equation"]).replace(" ", "").partition("->")
    terms, both = left.split(","), call["operands"]
    if len(both) != 2 or len(terms) != 2 or len(operands) != 1 or dense.weights is not None:
        return None
    at = 0 if both[0] is operands[0] else 1
    rows, term, other = both[at], terms[at], terms[1 - at]
    if len(term) != 3 or len(dense.axes) != 2:
        return None
    t, e = (term[dense.axes.index(axis)] for axis in _BY_TOKEN)
    if len(other) == 2:
        gates = gates_of(facts, both[1 - at])
        if other not in (t + e, e + t) or result != t + term[2]:
            return None
        named = (t + e if gates.axes == _BY_TOKEN else e + t) if gates is not None else ""
        if gates is not None and other == named:
            return DenseSum(gates.root, dense, rows, gates)
        return _unproved(call, facts, both[1 - at])
    weight = both[1 - at]
    dims = meta.shape(weight) if facts.aside(weight) is None and meta.is_tensor(weight) else ()
    fits = len(dims) == len(other) == 3 and other[0] == e and term[2] in other[1:]
    inner = other[1:].replace(term[2], "") if fits else ""
    same = fits and dims[0] == dense.experts and result == term[:2] + inner and len(inner) == 1
    return _after(call, dense) if same else None


def _sum(call: Call, facts: Facts, dense: Dense) -> Fact | None:
    """Return the sum over the experts."""
    dims = call["dim"] if isinstance(call["dim"], tuple | list) else [call["dim"]]
    rank = len(meta.shape(call["input"]))
    over = [meta.wrap_dim(dim, rank) for dim in dims]
    by_expert = len(dense.axes) == 2 and over == [dense.axes.index(Axis.EXPERT)]
    if not by_expert or call["keepdim"] or rank != 3 or not dense.products:
        return None
    if dense.weights is not None:
        return DenseSum(dense.weights.root, dense, call["input"], None)
    if dense.gates is not None and dense.zero:
        return DenseSum(dense.gates.root, dense, call["input"], None)
    return None


def _unproved(call: Call, facts: Facts, gates: Node) -> Miss | None:
    """Name gates that a router made, and of which nothing shows that they are zero elsewhere."""
    pending, seen = [gates], list[Node]()
    while pending and len(seen) < _SEARCHED:
        node = pending.pop(0)
        fact = facts.of(node) or facts.aside(node)
        if isinstance(fact, AboutRoot):
            return Miss(
                "dense-gate",
                call.node,
                fact.root,
                f"gates that may be other than zero everywhere ({gates.name})",
                "gates that are exactly zero but at the experts of each token",
                "scatter the weights into zeros, or the logits into -inf before the softmax",
            )
        seen.append(node)
        pending += [n for n in node.all_input_nodes if n not in seen]
    return None
