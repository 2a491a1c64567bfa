"""The order in which the nodes of a graph run.

It is the order in which TorchAir wrote them, moved only where a data or control edge asks for it. A
node that writes a buffer in place comes after the readers that were written before it, and before
those written after it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping

from moe_graph.emulator.engine.errors import GraphError
from moe_graph.emulator.engine.model import Graph, Node, Port
from moe_graph.emulator.engine.registry import Kernel


def execution_order(graph: Graph, kernels: Mapping[str, Kernel]) -> list[Node]:
    """Return the nodes of a graph in order of execution.

    Args:
        graph: parsed graph.
        kernels: node name -> kernel, for the nodes that have one.

    Raises:
        GraphError: the edges form a cycle.
    """
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    after: dict[str, set[str]] = defaultdict(set)  # node -> nodes that must wait for it
    for node in graph.nodes:
        for port in node.inputs:
            if port is not None:
                after[port.node].add(node.name)
        for control in node.controls:
            after[control].add(node.name)
    _order_writers(graph, kernels, position, after)
    waiting = dict.fromkeys(position, 0)
    for followers in after.values():
        for name in followers:
            waiting[name] += 1
    ready = [position[name] for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = graph.nodes[heapq.heappop(ready)]
        order.append(node)
        for name in after[node.name]:
            waiting[name] -= 1
            if waiting[name] == 0:
                heapq.heappush(ready, position[name])
    if len(order) != len(graph.nodes):
        stuck = next(node for node in graph.nodes if waiting[node.name] > 0)
        raise GraphError("a cycle", op=stuck.type, node=stuck.name, fx=stuck.fx)
    return order


def written_buffers(graph: Graph, kernels: Mapping[str, Kernel]) -> set[Port]:
    """Return the outputs of nodes that some other node writes in place."""
    return {port for _, port in _writers(graph, kernels)}


def _writers(graph: Graph, kernels: Mapping[str, Kernel]) -> Iterator[tuple[Node, Port]]:
    for node in graph.nodes:
        kernel = kernels.get(node.name)
        if kernel is not None and kernel.mutates and node.inputs[0] is not None:
            yield node, node.inputs[0]


def _order_writers(
    graph: Graph,
    kernels: Mapping[str, Kernel],
    position: Mapping[str, int],
    after: dict[str, set[str]],
) -> None:
    readers: dict[Port, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for port in node.inputs:
            if port is not None:
                readers[port].append(node)
    for writer, buffer in _writers(graph, kernels):
        for node in readers[buffer]:
            if node is not writer and node.type != "NetOutput":
                first, last = sorted((node.name, writer.name), key=position.__getitem__)
                after[first].add(last)
