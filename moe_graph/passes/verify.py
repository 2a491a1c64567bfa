"""Run a rewritten layer against the nodes that it replaced, on random inputs.

The part of the graph that the rewrite changes is copied twice, before and after; what it reads from
outside becomes inputs. Layers of equal structure are run once. Used with ``Config(verify=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.fx.node import map_arg

from moe_graph.passes import meta
from moe_graph.passes.canonical import canonical
from moe_graph.passes.rewriting import ProvedLayer, Rewrite
from moe_graph.passes.spellings import POSITIVE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""Largest difference by dtype, relative to the largest element of the result."""


class Verifier:
    """Checks the rewrites of one graph module; layers of equal structure are run once."""

    def __init__(self, owner: GraphModule) -> None:
        self._owner = owner
        self._found: dict[Hashable, tuple[float, float] | None] = {}

    def check(self, layer: ProvedLayer, rewrite: Rewrite) -> tuple[float, float] | None:
        """Connect a prepared rewrite and run it against what it replaces.

        The ids are random, then all tokens go to the first experts, then none to the last ones.

        Returns:
            Largest difference and the limit that it exceeds, None where they agree.
        """
        graph = self._owner.graph
        old = [n for n in graph.nodes if n in layer.body or n in layer.dead]
        # What the new nodes read may be what an input of the old ones is computed from.
        extra = set(boundary(rewrite.nodes)) - set(old) - set(boundary(old))
        shared = between(graph, extra, boundary(old))
        old = [n for n in graph.nodes if n in shared or n in layer.body or n in layer.dead]
        inputs = list(dict.fromkeys((*boundary(old), *extra)))
        key = structure(old, inputs)
        before = None
        if key not in self._found:
            before = extract(self._owner, old, inputs, layer.ending.result)
        rewrite.connect()
        if before is not None:
            members = layer.body | set(rewrite.nodes) | shared
            new = [n for n in graph.nodes if n in members]
            after = extract(self._owner, new, inputs, rewrite.total)
            self._found[key] = _difference(before, after, inputs, layer, rewrite.total)
        return self._found[key]


def _difference(
    before: GraphModule, after: GraphModule, inputs: list[Node], layer: ProvedLayer, total: Node
) -> tuple[float, float] | None:
    """Return the largest difference and its limit, None where it keeps the limit."""
    for choose in _CHOICES:
        values = _random_inputs(inputs, layer, choose)
        with torch.no_grad():
            # Copies, for the parts may write in place.
            expected = before(*copies(values)).float()
            result = after(*copies(values)).float()
        both_nan = result.isnan() & expected.isnan()
        difference = (result - expected).abs().masked_fill(both_nan, 0.0)
        error = difference.max().item() if expected.numel() else 0.0
        scale = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
        limit = TOLERANCE.get(meta.dtype(total), 1e-5) * max(scale, 1.0)
        if not error <= limit:
            return error, limit
    return None


def _any_experts(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    return scores.topk(top_k)[1]


def _first_experts(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.arange(top_k).expand(*scores.shape[:-1], top_k).contiguous()


def _not_the_last(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    return scores[..., : max(top_k, scores.shape[-1] - 1)].topk(top_k)[1]


_CHOICES = (_any_experts, _first_experts, _not_the_last)


def extract(owner: GraphModule, nodes: list[Node], inputs: list[Node], result: Any) -> GraphModule:
    """Return a module that computes `result`, one node or a tuple, from `inputs` by `nodes`."""
    graph = Graph()
    copied = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(map_arg(result, copied.__getitem__))
    return GraphModule(owner, graph)


def boundary(nodes: list[Node]) -> list[Node]:
    """Return what `nodes` read from outside, in the order of reading."""
    inside = set(nodes)
    return list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))


def between(graph: Graph, sources: set[Node], targets: Iterable[Node]) -> set[Node]:
    """Return the nodes on the ways from `sources` to `targets`, targets among them."""
    behind: set[Node] = set()
    for node in graph.nodes if sources else ():
        if any(source in sources or source in behind for source in node.all_input_nodes):
            behind.add(node)
    found: set[Node] = set()
    pending = [node for node in targets if node in behind]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [source for source in node.all_input_nodes if source in behind]
    return found


def structure(nodes: list[Node], inputs: list[Node]) -> Hashable:
    """Return a key that is equal for parts that compute the same from inputs of equal shape."""
    number = {node: index for index, node in enumerate([*inputs, *nodes])}

    def describe(node: Node) -> Hashable:
        value = meta.example(node)
        kind = (tuple(map(str, value.shape)), value.dtype) if meta.is_tensor(node) else str(value)
        args = (map_arg(node.args, number.get), map_arg(node.kwargs, number.get))
        return (str(node.target) if node in number else "", str(args), kind)

    return tuple(describe(node)[2] for node in inputs), tuple(map(describe, nodes))  # type: ignore[index]


def _random_inputs(
    inputs: Iterable[Node],
    layer: ProvedLayer,
    choose: Callable[[torch.Tensor, int], torch.Tensor],
) -> list[Any]:
    """Return values for the inputs: distinct experts for the ids, small numbers elsewhere.

    What an op of positive numbers makes is positive.
    """
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for node in inputs:
        value = meta.example(node)
        if not isinstance(value, torch.Tensor):
            values.append(concrete(value))
            continue
        dims = [concrete(dim) for dim in value.shape]
        if node is layer.root.ids:
            scores = torch.rand(*dims[:-1], layer.experts, generator=generator)
            values.append(choose(scores, dims[-1]).to(value.device, value.dtype))
        elif value.dtype.is_floating_point:
            drawn = torch.randn(dims, generator=generator) / max(dims[-1], 1) ** 0.5
            if canonical(node).op in POSITIVE:
                drawn = drawn.abs() + 1e-3
            values.append(drawn.to(value.device, value.dtype))
        else:
            values.append(torch.zeros(dims, dtype=value.dtype, device=value.device))
    return values


def concrete(value: Any) -> Any:
    """Return the number that a symbolic int stood for while tracing, 1 for a symbolic float."""
    if isinstance(value, torch.SymFloat):
        return 1.0
    return optimization_hint(value) if isinstance(value, torch.SymInt) else value


def copies(values: list[Any]) -> list[Any]:
    """Return `values` with copies of the tensors among them."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
