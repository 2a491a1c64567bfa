"""One ordered walk that gives nodes their facts.

Each canonical op has at most one transfer rule, ``rule(call, facts) -> Fact | Miss | None``. A rule
reads the facts of the operands as they are at that point of the graph: a write in place gives the
written tensor a new fact and takes the facts from everything that may share its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.canonical import Call, canonical, is_complete
from moe_graph.passes.facts import (
    Aside,
    Choice,
    CountOf,
    Counts,
    ExpertIds,
    Fact,
    Layout,
    Outputs,
    Root,
)
from moe_graph.passes.memory import Memory
from moe_graph.passes.misses import Miss
from moe_graph.passes.spellings import ELEMENTWISE

_ANY_INPUT = ELEMENTWISE | {"result"}
"""Ops whose first argument may be a number or a tuple."""

Rule = Callable[[Call, "Facts"], "Fact | Miss | None"]

_RULES: dict[str, Rule] = {}
_RULES_OF_FACTS: dict[type[Fact], Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a function as the transfer rule of canonical ops."""

    def register(function: Rule) -> Rule:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"op {op!r} has two transfer rules")
            _RULES[op] = function
        return function

    return register


def rule_of(*kinds: type[Fact]) -> Callable[[Rule], Rule]:
    """Register a function for ops on operands with such facts; it comes before their own rule."""

    def register(function: Rule) -> Rule:
        _RULES_OF_FACTS.update(dict.fromkeys(kinds, function))
        return function

    return register


class Facts:
    """The facts of one graph.

    Attributes:
        calls: canonical form of every node.
        position: place of every node in the graph.
        memory: who shares memory with whom.
        given: the fact that each node got when it was computed.
        misses: failed checks in graph order.
        grad: whether gradients are recorded where the node stands, as far as the graph switches it.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls: dict[Node, Call] = {}
        self.position: dict[Node, int] = {}
        self.memory = Memory()
        self.given: dict[Node, Fact] = {}
        self.misses: list[Miss] = []
        self.grad: dict[Node, bool] = {}
        self._now: dict[Node, Fact] = {}
        self._cause: dict[Node, Miss] = {}
        self._roots: dict[tuple[Node, int], Root] = {}
        self._walk(graph)

    def of(self, value: object) -> Fact | None:
        """Return the fact of an operand at this point of the walk."""
        fact = self._now.get(value) if isinstance(value, Node) else None
        return None if isinstance(fact, Aside) else fact

    def aside(self, value: object) -> Aside | None:
        """Return the fact of an operand that :meth:`of` does not tell."""
        fact = self._now.get(value) if isinstance(value, Node) else None
        return fact if isinstance(fact, Aside) else None

    def adopt(self, node: Node, fact: Fact) -> None:
        """Give `node` a fact that only a reader of it can know; it must have none."""
        self.given[node] = self._now[node] = fact

    def cause(self, value: object) -> Miss | None:
        """Return the failed check that `value` owes its lack of a fact to."""
        return self._cause.get(value) if isinstance(value, Node) else None

    def ids_without_bound(self, node: Node) -> ExpertIds | None:
        """Take an integer tensor that nothing is known about for expert ids, flat or ``[T, K]``."""
        call = self.calls.get(node)
        table = node
        if call is not None and call.op == "reshape" and meta.is_tensor(call["input"]):
            table = call["input"]
        dims = meta.shape(table)
        if not meta.is_integer(table) or len(dims) < 2 or not isinstance(dims[-1], int):
            return None
        root = self.root(table, 0, Choice(-1, distinct=False))
        return ExpertIds(root, Layout.TOKENS if table is node else Layout.SLOTS)

    def root(self, node: Node, index: int, choice: Choice) -> Root:
        """Return the root for output `index` of `node`, one and the same however often asked."""
        key = (self.calls[node]["input"], index) if self.calls[node].op == "result" else (node, 0)
        if key not in self._roots:
            dims = meta.shape(node)
            top_k = dims[-1] if isinstance(dims[-1], int) else -1
            bound = choice.bound if choice.bound >= 0 else None
            tokens = meta.product(dims[:-1])
            self._roots[key] = Root(node, tokens, top_k, bound, choice.distinct or top_k == 1)
        return self._roots[key]

    def _walk(self, graph: Graph) -> None:
        grad = True
        for position, node in enumerate(graph.nodes):
            call = canonical(node)
            self.calls[node] = call
            self.position[node] = position
            self.grad[node] = grad
            if call.op == "set_grad_enabled":
                grad = bool(call["input"])
                continue
            self.memory.note(call, position)
            self._take(call, self._apply(call))

    def _apply(self, call: Call) -> Fact | Miss | None:
        if not call.known or not is_complete(call):
            return None
        kinds = {type(self._now.get(source)) for source in call.node.all_input_nodes}
        for kind in kinds & _RULES_OF_FACTS.keys():
            found = _RULES_OF_FACTS[kind](call, self) if _has_meta(call) else None  # type: ignore[index]
            if found is not None:
                return found
        function = _RULES.get(call.op)
        if function is None:
            return None
        # The steps of ``counts.tolist()`` carry no example values.
        counted = isinstance(self.of(call.get("input")), Counts | CountOf)
        if not _has_meta(call) and not (counted and call.op in ("item", "slice")):
            return None
        found = function(call, self)
        if isinstance(found, Choice) and meta.is_tensor(call.node):
            dims = meta.shape(call.node)
            if len(dims) < 2 or not isinstance(dims[-1], int) or not meta.is_integer(call.node):
                return None
            index = call["index"] if call.op == "result" else 0
            return ExpertIds(self.root(call.node, index, found), Layout.TOKENS)
        return found

    def _take(self, call: Call, found: Fact | Miss | None) -> None:
        node = call.node
        if call.writes is not None:
            for other in self.memory.sharing(call.writes):
                if self._now.pop(other, None) is not None and other is not call.writes:
                    self._cause[other] = _written_through_view(node, other)
        inherited = next(filter(None, map(self._cause.get, node.all_input_nodes)), None)
        if isinstance(found, Miss) and inherited is None:
            self.misses.append(found)
            self._cause[node] = found
        elif isinstance(found, Fact):
            self.given[node] = found
            self._now[node] = found
            if call.writes is not None:
                self._now[call.writes] = found
                self._cause.pop(call.writes, None)
            return
        elif inherited is not None:
            self._cause[node] = inherited
        if call.writes is not None and node in self._cause:
            self._cause[call.writes] = self._cause[node]


def _has_meta(call: Call) -> bool:
    """Tell whether the shapes are known that a rule may ask for."""
    # What ``x[i] = v`` returns is nothing.
    nodes = call.node.all_input_nodes if call.writes else [call.node, *call.node.all_input_nodes]
    traced = all(meta.example(node) is not None for node in nodes)
    source = call.args.get("input")
    return traced and (
        not isinstance(source, Node) or call.op in _ANY_INPUT or meta.is_tensor(source)
    )


def _written_through_view(write: Node, victim: Node) -> Miss:
    return Miss(
        "in-place-write",
        write,
        None,
        lambda: f"a write to memory that {victim.name} may share",
        "no write between the router and the combine",
        "write to a copy, or use the out-of-place form",
    )


def outputs_of(fact: Fact | None, index: object) -> Fact | None:
    """Return the fact of one result of an op that returns a tuple."""
    if isinstance(fact, Outputs) and isinstance(index, int) and index < len(fact.facts):
        return fact.facts[index]
    return None


def integer_literal(value: object) -> int | None:
    """Return `value` if it is a whole number, None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None
