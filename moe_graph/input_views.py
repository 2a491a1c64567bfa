"""Give views of inputs back from the inputs themselves, past TorchAir.

TorchAir 2.13 returns what shares memory with an input as ``as_strided(input, size, stride,
offset)``, with the storage offset that the input had while tracing. Dynamo does not guard offsets.
An input at another one, such as the weights of the next expert in a stack, gets the memory of the
first; saved for the backward, that is a wrong gradient and no error.

Before::

    mm = aten.mm(x, w);  wt = aten.t(w)
    return (mm, x, wt)

After::

    mm = aten.mm(x, w)
    return (mm,)                  and around the compiled graph: (mm, x, aten.t(w))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_Compiled = Callable[..., Any]


def with_views_of_inputs(
    gm: GraphModule, inputs: Sequence[Any], convert: Callable[[GraphModule, Sequence[Any]], Any]
) -> tuple[Any, _Compiled]:
    """Convert an ATen graph without those of its outputs that are views of its inputs.

    Args:
        gm: functional ATen graph; its output node is changed.
        inputs: its example inputs.
        convert: makes a callable of the graph.

    Returns:
        What `convert` returned, and a callable that yields all outputs.
    """
    output = gm.graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    views = {place: node for place, node in enumerate(returned) if _is_view_of_input(node)}
    if not views:
        compiled = convert(gm, inputs)
        return compiled, compiled
    compute = _module_of(gm, list(views.values()))
    rest = [place for place in range(len(returned)) if place not in views]
    output.args = (tuple(returned[place] for place in rest),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    compiled = convert(gm, inputs)

    def call(*args: Any) -> tuple[Any, ...]:
        outputs: list[Any] = [None] * len(returned)
        for place, value in zip(rest, compiled(*args), strict=True):
            outputs[place] = value
        for place, value in zip(views, compute(*args), strict=True):
            outputs[place] = value
        return tuple(outputs)

    return compiled, call


def _is_view_of_input(node: Any) -> bool:
    """Tell whether a node is a tensor input or made of one by views alone."""
    while isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
        if node.op == "placeholder":
            return True
        if not _is_view(node) or not all(map(_is_size, node.all_input_nodes[1:])):
            return False
        node = node.all_input_nodes[0]
    return False


def _is_view(node: Node) -> bool:
    """Tell whether an op returns a view of its first argument, placed relative to it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is torch.ops.aten.as_strided.default:
        return False
    schema = target._schema
    if len(schema.returns) != 1 or not schema.arguments:
        return False
    given, got = schema.arguments[0].alias_info, schema.returns[0].alias_info
    if given is None or got is None or given.is_write:
        return False
    return bool(given.before_set == got.before_set)


def _is_size(node: Node) -> bool:
    """Tell whether a node is a number that is computed from the inputs' sizes."""
    if not isinstance(node.meta.get("val"), int | torch.SymInt):
        return False
    sources = node.all_input_nodes
    return all(source.op == "placeholder" or _is_size(source) for source in sources)


def _module_of(gm: GraphModule, nodes: list[Node]) -> GraphModule:
    """Return a module of all inputs of `gm` that computes `nodes`."""
    graph = Graph()
    copied: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in copied:
            copied[node] = graph.node_copy(node, copy)
        return copied[node]

    for placeholder in gm.graph.find_nodes(op="placeholder"):
        copy(placeholder)
    graph.output(tuple(copy(node) for node in nodes))
    return GraphModule(gm, graph)
