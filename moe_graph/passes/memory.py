"""Which nodes may share memory, and when that memory is written.

Dynamo graphs write in place. A value that is read after a write is another value than before it,
for every node that views the same memory. Groups only grow: two nodes that may share memory are
taken to share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.canonical import Call
from moe_graph.passes.spellings import VIEWS

_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


class Memory:
    """Groups of nodes that may share memory, and the writes to each, in graph order."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}
        self._members: dict[Hashable, list[Node]] = {}
        self._writes: list[tuple[int, Node]] = []
        self._fresh_tuples: set[Node] = set()

    def note(self, call: Call, position: int) -> None:
        """Take in the next call of the graph."""
        node = call.node
        self._add(node)
        if call.writes is not None:
            self._writes.append((position, call.writes))
            self._union(node, call.writes)
            return
        if call.op == "result" and call["input"] in self._fresh_tuples:
            self._union(node, (call["input"], call["index"]))
            return
        if isinstance(meta.example(node), _NUMBERS):
            return
        if not call.known:
            for source in node.all_input_nodes:
                self._union(node, source)
        elif call.op in VIEWS:
            if node.all_input_nodes:
                self._union(node, node.all_input_nodes[0])
        elif not meta.is_tensor(node):
            self._fresh_tuples.add(node)

    def sharing(self, node: Node) -> Iterator[Node]:
        """Yield the nodes so far that may share memory with `node`, itself included."""
        yield from self._members.get(self._find(node), [])

    def written_between(self, node: Node, start: int, end: int) -> Node | None:
        """Return a node whose write at a position in ``(start, end)`` may change `node`."""
        group = self._find(node)
        for position, written in self._writes:
            if start < position < end and self._find(written) == group:
                return written
        return None

    def _add(self, node: Node) -> None:
        self._parent.setdefault(node, node)
        self._members.setdefault(node, [node])

    def _find(self, key: Hashable) -> Hashable:
        parent = self._parent.setdefault(key, key)
        while parent != key:
            self._parent[key] = self._parent.setdefault(parent, parent)
            key, parent = parent, self._parent[parent]
        return key

    def _union(self, left: Hashable, right: Hashable) -> None:
        left, right = self._find(left), self._find(right)
        if left == right:
            return
        self._parent[left] = right
        self._members.setdefault(right, []).extend(self._members.pop(left, []))
