"""What a node holds where another node reads it: the ground that the readers of routers stand on.

A graph of dynamo writes in place: after ``w /= total`` the same tensor is another value. A reader
that walks backwards asks for the call that made the value, not for the node::

    topk = torch.topk(scores, 2);  w = topk[0]        values.made(w, at=total).op    -> "result"
    total = w.sum(-1, keepdim=True)
    w.div_(total)
    out = rows * w                                    values.made(w, at=out).op      -> "div"

Calls are read from the graph as it is now, so the answers stay right while layers are rewritten.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call, canonical, is_complete
from moe_graph.passes.spellings import RANDOM

ZEROS = ("zeros", "zeros_like", "new_zeros")
ONES = ("ones", "ones_like", "new_ones")
FULL = ("full", "full_like", "new_full")


class Values:
    """The values of one graph, whose layers may have been rewritten since `facts` were found.

    Args:
        graph: the graph.
        facts: what was found before any layer was rewritten.
    """

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._memory = facts.memory
        self._calls: dict[Node, Call] = {}
        self._position: dict[Node, float] = {}
        self._grad: dict[Node, bool] = {}
        grad, last = True, -1
        for node in graph.nodes:
            # A new node stands behind the old one before it; the writes are known by old ones.
            last = facts.position.get(node, last)
            self._position[node] = last + (0.0 if node in facts.position else 0.5)
            self._grad[node] = grad
            if node.op == "call_function" and node.target in _GRAD_SWITCHES:
                grad = bool(node.args[0])

    def forget(self) -> None:
        """Read every call anew: the graph has changed."""
        self._calls.clear()

    def note_change(self, added: list[Node], at: Node, erased: set[Node]) -> None:
        """Take in nodes that were inserted before `at`, and forget erased ones."""
        for node in added:
            self._position[node] = self._position[at] - 0.5
            self._grad[node] = self._grad[at]
        for node in erased:
            del self._position[node]
        self.forget()

    def call(self, node: Node) -> Call:
        """Return a node in canonical form."""
        if node not in self._calls:
            self._calls[node] = canonical(node)
        return self._calls[node]

    def position(self, node: Node) -> float:
        """Return where a node stands; new nodes stand right behind the old one before them."""
        return self._position[node]

    def records_gradients(self, node: Node) -> bool:
        """Tell whether gradients are recorded where a node stands."""
        return self._grad[node]

    def aliases(self, node: Node) -> set[Node]:
        """Return the nodes that are the very tensor `node`: what writes it in place returns it."""
        found: set[Node] = set()
        pending = [node]
        while pending:
            alias = pending.pop()
            if alias in found:
                continue
            found.add(alias)
            written = self.call(alias).writes
            pending += [written] if written is not None and meta.is_tensor(alias) else []
            pending += [w for w in self.writers(alias) if meta.is_tensor(w)]
        return found

    def writers(self, node: Node) -> list[Node]:
        """Return the calls that write `node` in place."""
        return [user for user in node.users if self.call(user).writes is node]

    def sharing(self, node: Node) -> set[Node]:
        """Return the nodes that may share memory with `node`, itself included."""
        return {node, *(n for n in self._memory.sharing(node) if n in self._position)}

    def written(self, node: Node, start: Node, end: Node | None = None) -> bool:
        """Tell whether the memory of `node` is written between two nodes, or from one on."""
        last = math.inf if end is None else self._position[end]
        first = self._position[start]
        return self._memory.written_between(node, first, last) is not None  # type: ignore[arg-type]

    def made(self, value: Any, at: Node) -> Call | None:
        """Return the call that made what `value` holds where `at` reads it.

        None where `value` is no tensor, its meta is missing, or a write through a view leaves it
        open.
        """
        if not meta.is_tensor(value):
            return None
        aliases = self.aliases(value)
        origin = next(alias for alias in aliases if self.call(alias).writes is None)
        end = self._position[at]
        writers = {w for alias in aliases for w in self.writers(alias) if self._position[w] < end}
        maker = max(writers, key=self._position.__getitem__, default=origin)
        call = self.call(maker)
        if self.written(value, maker, at):
            return None
        return call if call.known and is_complete(call) else None

    def operand(self, call: Call, name: str, *, detached: bool = False) -> Call | None:
        """Return the call that made an argument, behind what changes neither value nor shape.

        `detached`: gradients do not matter, so a detach changes nothing either.
        """
        return self.plain(self.made(call.get(name), call.node), detached=detached)

    def plain(self, call: Call | None, *, detached: bool = False) -> Call | None:
        """Return `call` or, where it changes neither value nor shape, the call that it reads."""
        while call is not None and call.writes is None and self._is_plain(call, detached):
            before = self.made(call["input"], call.node)
            if before is None:
                return call
            call = before
        return call

    def _is_plain(self, call: Call, detached: bool) -> bool:
        if call.op not in ("cast", "reshape", "detach"):
            return False
        if not (meta.is_tensor(call.node) and meta.is_tensor(call.get("input"))):
            return False
        if call.op == "detach":
            return detached
        before, after = meta.example(call["input"]), meta.example(call.node)
        same_shape = meta.same_shape(tuple(before.shape), tuple(after.shape))
        return before.dtype == after.dtype and before.device == after.device and same_shape


def is_constant(call: Call) -> bool:
    """Tell whether a call makes the same numbers whatever its operands hold."""
    return call.op == "arange" or call.op in ZEROS + ONES + FULL


def is_droppable(call: Call) -> bool:
    """Tell whether a call may be erased once nothing uses it."""
    is_call = call.node.op in ("call_function", "call_method")
    return is_call and call.known and call.op not in RANDOM and call.op != "set_grad_enabled"


def is_last_dim(dim: Any, node: Node) -> bool:
    """Tell whether `dim` is the last dimension of a tensor node."""
    rank = len(meta.shape(node))
    return meta.wrap_dim(dim, rank) == rank - 1


def argument(call: Call, name: str, place: int) -> Any:
    """Return an argument of an op that has no signature, given by name or at a place."""
    return call.args.get(name, call.args.get(str(place)))


def number(value: Any) -> float | None:
    """Return a literal number (a bool counts as 0 or 1), None for anything else."""
    return float(value) if isinstance(value, int | float) else None


_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled)
