"""Change a captured graph without changing what it computes.

What dynamo hands over drifts with every version of PyTorch and every edit of a model: other names,
another order, a view or a cast more, one more reader of a value. Each change here is one of these.
Shapes may be symbolic: a new node takes its example value from those of its operands.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.nn import functional

Change = Callable[[random.Random, GraphModule], str | None]

_ALWAYS_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    torch._C._set_grad_enabled,
}


def mutants(gm: GraphModule, count: int, seed: int, most: int = 4) -> list[tuple[str, GraphModule]]:
    """Return `count` copies of `gm` with one to `most` changes each, and what the changes are."""
    chooser = random.Random(seed)
    found = []
    while len(found) < count:
        mutant = copy.deepcopy(gm)
        made: list[str] = []
        for _ in range(chooser.randint(1, most)):
            name, change = chooser.choice(list(CHANGES.items()))
            where = change(chooser, mutant)
            if where is not None:
                made.append(f"{name} at {where}")
        if chooser.random() < 0.1:
            mutant = checkpointed(mutant)
            made.append("checkpoint")
        if not made:
            continue
        mutant.graph.lint()
        mutant.recompile()
        found.append(("; ".join(made), mutant))
    return found


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op in ("call_function", "call_method")]


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _tensors(graph: Graph) -> list[Node]:
    return [n for n in _calls(graph) if isinstance(_value(n), torch.Tensor)]


def _is_write(node: Node) -> bool:
    """Tell whether a call must keep its place among the others."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _ALWAYS_IN_PLACE or "assert" in name


def _insert(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node | None:
    """Add a call before the insertion point; None where its operands do not allow it."""
    values = map_arg(args, _value)
    example = _value(like)
    assert isinstance(example, FakeTensor)
    try:
        with example.fake_mode, torch.enable_grad():
            if isinstance(target, str):
                value = getattr(values[0], target)(*values[1:])
            else:
                value = target(*values)
    except (RuntimeError, IndexError, TypeError):
        return None
    create = graph.call_method if isinstance(target, str) else graph.call_function
    node = create(target, args)
    node.meta.update({k: v for k, v in like.meta.items() if k != "example_value"})
    node.meta["example_value"] = value
    return node


def _dim_of(chooser: random.Random, value: torch.Tensor) -> int:
    return chooser.randrange(value.dim() + 1)


def _unsqueezed(chooser: random.Random, graph: Graph, source: Node) -> Node | None:
    dim = _dim_of(chooser, _value(source))
    longer = _insert(graph, "unsqueeze", (source, dim), source)
    return _insert(graph, "squeeze", (longer, dim), source) if longer else None


def _twice_transposed(chooser: random.Random, graph: Graph, source: Node) -> Node | None:
    swapped = _insert(graph, "transpose", (source, 0, -1), source)
    return _insert(graph, "transpose", (swapped, 0, -1), source) if swapped else None


def _flattened(chooser: random.Random, graph: Graph, source: Node) -> Node | None:
    flat = _insert(graph, "reshape", (source, -1), source)
    return _insert(graph, "view_as", (flat, source), source) if flat else None


def _simple(target: Any, *args: Any, only: Callable[[torch.Tensor], bool] = lambda _: True) -> Any:
    def insert(chooser: random.Random, graph: Graph, source: Node) -> Node | None:
        return _insert(graph, target, (source, *args), source) if only(_value(source)) else None

    return insert


def _no_op_cast(chooser: random.Random, graph: Graph, source: Node) -> Node | None:
    return _insert(graph, "to", (source, _value(source).dtype), source)


def _is_number(value: torch.Tensor) -> bool:
    return value.dtype != torch.bool


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point()


NO_OPS: dict[str, Callable[[random.Random, Graph, Node], Node | None]] = {
    "[:]": _simple(operator.getitem, slice(None, None, None), only=lambda v: v.dim() > 0),
    "[...]": _simple(operator.getitem, Ellipsis),
    "view": _flattened,
    "contiguous": _simple("contiguous"),
    "clone": _simple("clone"),
    "cast": _no_op_cast,
    "+ 0": _simple(operator.add, 0, only=_is_number),
    "* 1": _simple(operator.mul, 1, only=_is_number),
    "dropout 0": _simple(functional.dropout, 0.0, True, False, only=_is_float),
    "unsqueeze squeeze": _unsqueezed,
    "transpose transpose": _twice_transposed,
}


def _between(kind: str) -> Change:
    """Put something that changes nothing between a value and one of its readers."""

    def change(chooser: random.Random, gm: GraphModule) -> str | None:
        edges = [
            (source, user)
            for source in _tensors(gm.graph)
            for user in source.users
            if user.op != "output" and not _is_write(user)
        ]
        if not edges:
            return None
        source, user = chooser.choice(edges)
        with gm.graph.inserting_before(user):
            new = NO_OPS[kind](chooser, gm.graph, source)
        if new is None:
            return None
        user.replace_input_with(source, new)
        return f"{source.name} -> {user.name}"

    return change


def _returned(target: Any, *args: Any) -> Change:
    """Return something more that is computed from a value."""

    def change(chooser: random.Random, gm: GraphModule) -> str | None:
        source = chooser.choice(_tensors(gm.graph))
        if not _value(source).dim():
            return None
        output = gm.graph.output_node()
        with gm.graph.inserting_after(source):
            new = _insert(gm.graph, target, (source, *args), source)
        if new is None:
            return None
        output.args = ((*output.args[0], new),)  # type: ignore[misc]
        return source.name

    return change


def _dead_reader(chooser: random.Random, gm: GraphModule) -> str | None:
    """Read a value and do nothing with it."""
    source = chooser.choice(_tensors(gm.graph))
    with gm.graph.inserting_after(source):
        new = _insert(gm.graph, "detach", (source,), source)
    return source.name if new is not None else None


def _reorder(chooser: random.Random, gm: GraphModule) -> str | None:
    """Put the calls into another order that respects data, writes and grad modes."""
    graph, segment = gm.graph, list[Node]()
    moved = 0
    for node in [*_calls(graph), graph.output_node()]:
        if node.op == "output" or _is_write(node):
            moved += _shuffle(chooser, segment)
            segment = []
        else:
            segment.append(node)
    return f"{moved} nodes" if moved else None


def _shuffle(chooser: random.Random, segment: list[Node]) -> int:
    """Put the nodes, which follow one another, into a random topological order."""
    if len(segment) < 2:
        return 0
    anchor, waiting = segment[0].prev, list(segment)
    moved = 0
    while waiting:
        ready = [n for n in waiting if not any(s in waiting for s in n.all_input_nodes)]
        node = chooser.choice(ready)
        moved += node is not waiting[0]
        waiting.remove(node)
        anchor.append(node)
        anchor = node
    return moved


def _rename(chooser: random.Random, gm: GraphModule) -> str:
    """Give the calls other names."""
    number = chooser.randrange(1000)
    for i, node in enumerate(_calls(gm.graph)):
        node._rename(f"value_{number}_{i}")
    return f"{number}"


def _split_modules(chooser: random.Random, gm: GraphModule) -> str:
    """Let a later part of the calls come from another module."""
    calls = _calls(gm.graph)
    first = chooser.randrange(len(calls))
    for node in calls[first:]:
        node.meta["nn_module_stack"] = {"second": ("L['self'].second", torch.nn.Module)}
    return calls[first].name


CHANGES: dict[str, Change] = {
    **{kind: _between(kind) for kind in NO_OPS},
    "reorder": _reorder,
    "rename": _rename,
    "split": _split_modules,
    "reader": _dead_reader,
    "returned size": _returned(torch.ops.aten.sym_size.int, 0),
    "returned detached": _returned("detach"),
    "returned flat": _returned("reshape", -1),
}
"""Every change but the checkpoint, which is around the whole graph."""


def checkpointed(gm: GraphModule) -> GraphModule:
    """Return a graph that runs all of `gm` in one activation checkpoint."""
    body = copy.deepcopy(gm)
    root, graph = torch.nn.Module(), Graph()
    root.body = body
    inputs = []
    for node in body.graph.find_nodes(op="placeholder"):
        inputs.append(graph.placeholder(str(node.target)))
        inputs[-1].meta.update(node.meta)
    run = graph.call_function(
        torch.ops.higher_order.tag_activation_checkpoint,
        (graph.get_attr("body"), *inputs),
        {"use_reentrant": False},
    )
    outputs = []
    for i, node in enumerate(body.graph.output_node().args[0]):  # type: ignore[arg-type]
        outputs.append(graph.call_function(operator.getitem, (run, i)))
        outputs[-1].meta.update(node.meta)
    run.meta["example_value"] = tuple(_value(node) for node in outputs)
    graph.output(tuple(outputs))
    return GraphModule(root, graph)
