"""Take out of a graph what changes nothing, so that no rule has to look past it.

Before::

    w = topk[0] * 1;  rows = x[:][token];  n = y.shape[0]
    flat = h.unsqueeze(0).squeeze(0);  copy = h.detach()    # which nobody reads

After::

    w = topk[0];  rows = x[token];  n = x.shape[0]
    flat = h

A copy of the graph is simplified: one in which no layer is rewritten stays as it was, to the node.
As in PyTorch's own compilers, ``x + 0`` counts as x, though it turns -0.0 into 0.0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from moe_graph.passes import meta
from moe_graph.passes.canonical import Call, canonical
from moe_graph.passes.memory import Memory
from moe_graph.passes.region import ASSERTS, is_identity
from moe_graph.passes.spellings import RANDOM, VIEWS

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
"""Op -> second operand that leaves the first as it is."""

_SIZES = ("size", "sym_size")


def simplified(graph: Graph) -> Graph | None:
    """Return a simpler copy of a graph that computes the same, None where there is none."""
    simpler = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, simpler.nodes, strict=True):
        # Dynamo says by an attribute of its own where each input comes from.
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, getattr(old, name))
    return simpler if _Simplification(simpler).run() else None


class _Simplification:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._calls = {node: canonical(node) for node in graph.nodes}
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        self._memory = Memory()
        self._without_grad: set[Node] = set()
        self._holders: dict[str, tuple[Node, int]] = {}
        grad = True
        for node, call in self._calls.items():
            self._memory.note(call, self._position[node])
            if call.op == "set_grad_enabled":
                grad = bool(call["input"])
            elif not grad:
                self._without_grad.add(node)
        self._returned = set(graph.output_node().all_input_nodes)

    def run(self) -> bool:
        """Simplify the graph; tell whether there was anything to simplify."""
        changed = False
        for node in list(self._calls):
            call = self._calls[node]
            steps = self._steps_from_origin(call)
            if steps and self._is_plain(steps):
                changed |= self._let_read(node, steps[-1]["input"])
            elif call.op in _SIZES:
                size = self._same_size(call)
                changed |= size is not None and self._let_read(node, size, outputs=True)
            self._note_sizes(node)
        return self._erase_dead() or changed

    def _steps_from_origin(self, call: Call) -> list[Call]:
        """Return the calls, last first, that together yield their input again; none if unknown."""
        steps = [call]
        while (source := _passed_on(steps[-1])) is not None:
            alike = _same_strides(source, call.node) or self._is_index(steps)
            if alike and _same_kind(source, call.node) and _is_one_value(steps):
                return steps
            steps.append(self._calls[source])
        return []

    def _is_index(self, steps: list[Call]) -> bool:
        """Tell whether only ops that do not care for strides read a whole number per element."""
        node = steps[0].node
        readers = [self._calls[user] for user in node.users]
        by_value = all(reader.known and reader.op not in VIEWS for reader in readers)
        permuted = any(step.op == "permute" for step in steps)
        return meta.is_integer(node) and by_value and not permuted

    def _is_plain(self, steps: list[Call]) -> bool:
        """Tell whether memory and gradients are the same before and after `steps`.

        A copy that shares its memory with what is written or returned is there for a reason.
        """
        origin, nodes = steps[-1]["input"], [step.node for step in steps]
        if any(node in self._without_grad for node in nodes):
            return False
        start, end = self._position[origin], len(self._position)
        if any(self._memory.written_between(n, start, end) for n in (origin, *nodes)):
            return False
        return not any(other in self._returned for other in self._memory.sharing(nodes[0]))

    def _let_read(self, node: Node, other: Node | int, outputs: bool = False) -> bool:
        """Let the readers of `node` read `other`; tell whether there were any."""
        readers = [user for user in node.users if outputs or user.op != "output"]
        for user in readers:
            change = _Replace(node, other)
            user.args = map_arg(user.args, change)
            user.kwargs = map_arg(user.kwargs, change)
            self._calls[user] = canonical(user)
        return bool(readers)

    def _same_size(self, call: Call) -> Node | int | None:
        """Return a number or an earlier reader's operand for what reads one size of a tensor."""
        size = meta.example(call.node)
        if isinstance(size, int):
            return size
        if not isinstance(size, torch.SymInt) or _data_sizes(call.node):
            return None
        holder, dim = self._holders.get(str(size), (call.node, 0))
        if holder is call.node or not meta.same_dim(_held(holder, dim), size):
            return None
        if not meta.is_tensor(holder):
            return holder
        source = call.node.all_input_nodes[0]
        if self._position[holder] >= self._position[source]:
            return None
        with self._graph.inserting_after(holder):
            read = self._graph.call_function(torch.ops.aten.sym_size.int, (holder, dim))
        read.meta["example_value"] = size
        self._calls[read] = canonical(read)
        self._position[read] = self._position[holder]
        return read

    def _note_sizes(self, node: Node) -> None:
        value = meta.example(node)
        sizes = tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)
        for dim, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                self._holders.setdefault(str(size), (node, dim))

    def _erase_dead(self) -> bool:
        erased = False
        for node in reversed(self._graph.nodes):
            if not node.users and self._is_droppable(self._calls[node]):
                self._graph.erase_node(node)
                erased = True
        return erased

    def _is_droppable(self, call: Call) -> bool:
        if call.node.op not in ("call_function", "call_method") or call.writes is not None:
            return False
        if call.op in ASSERTS or call.op == "set_grad_enabled" or _names_a_size(call.node):
            return False
        random = call.op in RANDOM and not is_identity(call)
        return (call.known or call.op in _SIZES) and not random


class _Replace:
    def __init__(self, old: Node, new: Any) -> None:
        self._old, self._new = old, new

    def __call__(self, node: Node) -> Any:
        return self._new if node is self._old else node


def _names_a_size(node: Node) -> bool:
    """Tell whether the data decide a size of the result, which tracing has given a name here."""
    known = {symbol for source in node.all_input_nodes for symbol in _data_sizes(source)}
    return not known >= _data_sizes(node)


def _data_sizes(node: Node) -> set[Any]:
    value = meta.example(node)
    return set() if value is None else set(free_unbacked_symbols(value))


def _held(holder: Node, dim: int) -> Any:
    return meta.shape(holder)[dim] if meta.is_tensor(holder) else meta.example(holder)


def _passed_on(call: Call) -> Node | None:
    """Return the operand whose elements `call` yields, all of them and nothing else."""
    source = call.get("input")
    if not call.known or call.writes is not None or not isinstance(source, Node):
        return None
    if not (meta.is_tensor(source) and meta.is_tensor(call.node)):
        return None
    if meta.dtype(source) != meta.dtype(call.node):
        return None
    if call.op in ("reshape", "permute", "cast") or is_identity(call):
        return source
    neutral = _NEUTRAL.get(call.op)
    other = call.get("other")
    plain = not isinstance(other, Node | bool) and isinstance(other, int | float)
    exact = call.get("rounding_mode") is None
    return source if neutral is not None and plain and other == neutral and exact else None


def _same_kind(left: Node, right: Node) -> bool:
    """Tell whether two tensors have one shape and one kind of memory."""
    one, other = meta.example(left), meta.example(right)
    same = one.device == other.device and one.layout == other.layout == torch.strided
    return same and meta.same_shape(tuple(one.shape), tuple(other.shape))


def _same_strides(left: Node, right: Node) -> bool:
    one, other = (tuple(meta.example(node).stride()) for node in (left, right))
    return meta.same_shape(one, other)


def _is_one_value(steps: list[Call]) -> bool:
    """Tell whether values of one geometry at both ends of `steps` are the same values.

    Row-major order stays in everything but a permutation, and views of one memory with one geometry
    are equal.
    """
    permuted = any(step.op == "permute" for step in steps)
    return not permuted or all(step.op == "permute" for step in steps)
