"""E bodies of a loop over experts, compared: one body and the parameters that it differs in.

::

    expert 0    linear(silu(linear(rows_0, w1_0)), w2_0)
    expert 1    linear(silu(linear(rows_1, w1_1)), w2_1)

are one body ``linear(silu(linear(rows, w1)), w2)`` whose products read another matrix per expert.
A body that differs in anything else keeps the whole loop as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import Grouped, Part, PerSlot, Root, Rows
from moe_graph.passes.facts_rowwise import as_row_wise
from moe_graph.passes.misses import Miss
from moe_graph.passes.region import body_of
from moe_graph.passes.stacks import Stack, stack_of

PRODUCT_PARAMETERS = {"linear": ("weight", "bias"), "matmul": ("other",)}
"""Product -> its arguments that may be another tensor for every expert."""

ADDED_BIAS = ("add", "other")
"""Op and argument that may be, too: a vector that is added to a product and to nothing else."""


@dataclass(frozen=True, eq=False)
class Loop:
    """Equal bodies, one per expert.

    Attributes:
        root: the expert ids.
        experts: number of experts.
        rows: what the body of expert 0 yields.
        body: nodes of expert 0 that compute its rows, in graph order, leaves included.
        parameters: (product of expert 0, argument) -> tensor of every expert.
    """

    root: Root
    experts: int
    rows: Node
    body: list[Node]
    parameters: dict[tuple[Node, str], Stack]


def loop_of(facts: Facts, rows: Sequence[Node]) -> Loop | Miss | None:
    """Return the loop whose bodies yield `rows`, by expert, or why they are not one.

    None says that no product reads a matrix of its own for every expert: no MoE layer.
    """
    first = as_row_wise(rows[0], facts.given.get(rows[0]))
    assert first is not None
    comparison = _Comparison(facts, first.root)
    for expert in range(1, len(rows)):
        miss = comparison.compare(expert, rows[0], rows[expert])
        if miss is not None:
            return miss
    if all(facts.calls[node].op == "add" for node, _ in comparison.parameters):
        return None
    body = body_of(facts, rows[0], first.leaves)
    in_order = sorted(body, key=facts.position.__getitem__)
    stacks = {key: stack_of(facts, nodes) for key, nodes in comparison.parameters.items()}
    return Loop(first.root, len(rows), rows[0], in_order, stacks)


@dataclass
class _Comparison:
    """Compares the body of each expert with that of expert 0."""

    facts: Facts
    root: Root
    parameters: dict[tuple[Node, str], list[Node]] = field(default_factory=dict)
    _pairs: dict[Node, Node] = field(default_factory=dict)
    _expert: int = 0

    def compare(self, expert: int, first: Node, other: Node) -> Miss | None:
        """Return where the body of `expert` differs, None when it is the same."""
        self._expert, self._pairs = expert, {}
        return self._rows(first, other)

    def _rows(self, first: Node, other: Node) -> Miss | None:
        """Compare two values in the order of an expert's rows."""
        if first in self._pairs:
            same = self._pairs[first] is other
            return None if same else self._miss(other, other.name, self._pairs[first].name)
        self._pairs[first] = other
        left, right = self.facts.given.get(first), self.facts.given.get(other)
        if type(left) is not type(right):
            return self._miss(other, type(right).__name__, type(left).__name__)
        if isinstance(left, Rows | PerSlot | Part) and isinstance(right, Rows | PerSlot | Part):
            same = left.source is right.source
            return None if same else self._miss(other, right.source.name, left.source.name)
        return self._calls(self.facts.calls[first], self.facts.calls[other])

    def _calls(self, first: Call, other: Call) -> Miss | None:
        if first.op != other.op or first.args.keys() != other.args.keys():
            return self._miss(other.node, other.op, first.op)
        if (first.writes is None) != (other.writes is None):
            return self._miss(other.node, "a write in place", "the same without one")
        kinds = [_kind(call.node) for call in (first, other)]
        if kinds[0] != kinds[1]:
            return self._miss(other.node, str(kinds[1]), str(kinds[0]))
        for name, value in first.args.items():
            miss = self._values(first, other, name, value, other.args[name])
            if miss is not None:
                return miss
        return self._writes(first.node, other.node)

    def _writes(self, first: Node, other: Node) -> Miss | None:
        """Compare the writes in place to two values."""
        writes = [
            [user for user in node.users if self.facts.calls[user].writes is node]
            for node in (first, other)
        ]
        if len(writes[0]) != len(writes[1]):
            return self._miss(other, f"{len(writes[1])} writes", f"{len(writes[0])} writes")
        for pair in zip(*writes, strict=True):
            miss = self._rows(*pair)
            if miss is not None:
                return miss
        return None

    def _values(self, first: Call, other: Call, name: str, left: Any, right: Any) -> Miss | None:
        if isinstance(left, tuple | list) and isinstance(right, tuple | list):
            if len(left) != len(right):
                return self._miss(other.node, f"{name} = {right}", f"{name} = {left}")
            for pair in zip(left, right, strict=True):
                miss = self._values(first, other, name, *pair)
                if miss is not None:
                    return miss
            return None
        if not isinstance(left, Node) or not isinstance(right, Node):
            same = type(left) is type(right) and bool(left == right)
            return None if same else self._miss(other.node, f"{name} = {right}", f"{name} = {left}")
        if isinstance(self.facts.given.get(left), Grouped):
            return self._rows(left, right)
        return self._parameters(first, other, name, left, right)

    def _parameters(
        self, first: Call, other: Call, name: str, left: Node, right: Node
    ) -> Miss | None:
        """Compare tensors from outside the bodies."""
        key = (first.node, name)
        if left is right and key not in self.parameters:
            return None
        added = (first.op, name) == ADDED_BIAS and self._is_bias(first)
        if name not in PRODUCT_PARAMETERS.get(first.op, ()) and not added:
            return self._miss(other.node, f"{name} = {right.name}", f"{name} = {left.name}")
        kinds = [f"{name} {meta.dtype(node)} {list(meta.shape(node))}" for node in (left, right)]
        if kinds[0] != kinds[1]:
            return self._miss(other.node, kinds[1], kinds[0])
        found = self.parameters.setdefault(key, [left] * self._expert)
        found.append(right)
        return None

    def _is_bias(self, add: Call) -> bool:
        """Tell whether a call adds a vector to a product of expert 0 that nothing else reads."""
        product, bias = add["input"], add["other"]
        plain = add["alpha"] == 1 and add.writes is None and len(meta.shape(bias)) == 1
        known = any(node is product for node, _ in self.parameters)
        return plain and known and list(product.users) == [add.node]

    def _miss(self, node: Node, got: str, want: str) -> Miss:
        return Miss(
            "equal-experts",
            node,
            self.root,
            f"expert {self._expert}: {got}",
            f"as for expert 0: {want}",
            "experts that are equal but for their weights become one grouped product",
        )


def _kind(node: Node) -> Any:
    """Return dtype and all but the first dimension of a value, which counts an expert's rows."""
    value = meta.example(node)
    if not meta.is_tensor(node):
        return type(value)
    return (value.dtype, *map(str, value.shape[1:])) if value.dim() else (value.dtype,)
