"""How a rewrite takes its place: new nodes beside the old ones, then readers, then the old ones go.

Until the old nodes are erased, :meth:`Rewrite.restore` takes everything back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from torch.fx import Graph, Node

from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Emitter, Results
from moe_graph.passes.endings import Ending
from moe_graph.passes.facts import Root


class ProvedLayer(Protocol):
    """What the rewrites and the verifier need to know of a layer, whatever its form."""

    @property
    def anchor(self) -> Node:
        """Node that stands for it in the report."""

    @property
    def root(self) -> Root:
        """The expert ids."""

    @property
    def experts(self) -> int:
        """Number of experts."""

    @property
    def form(self) -> str:
        """How the source computes the experts."""

    @property
    def ending(self) -> Ending:
        """Where the sum is."""

    @property
    def body(self) -> set[Node] | frozenset[Node]:
        """Nodes that stay."""

    @property
    def dead(self) -> set[Node]:
        """Nodes that fall away."""


class Rewrite(ABC):
    """The rewrite of one layer.

    Args:
        graph: graph of the layer.
        facts: what is known about its nodes.
        layer: what to replace.
        path: module path of the layer.
        results: example values that are known from other layers.

    Attributes:
        replacements: old node -> new node.
        nodes: the new nodes, in the order of their making.
    """

    def __init__(
        self, graph: Graph, facts: Facts, layer: ProvedLayer, path: str, results: Results
    ) -> None:
        self._graph = graph
        self._facts = facts
        self._proved = layer
        self._emit = Emitter(graph, path, results)
        self.replacements: dict[Node, Node] = {}
        self._operands: dict[Node, Node] = {}
        """Old node -> new node, for the nodes of the body only."""
        self._before: dict[Node, tuple[Any, Any]] = {}

    @property
    def nodes(self) -> list[Node]:
        """The new nodes, in the order of their making."""
        return self._emit.nodes

    @property
    def total(self) -> Node:
        """The new node that yields the sum."""
        return self.replacements[self._proved.ending.end]

    def prepare(self) -> None:
        """Make the new nodes beside the old ones.

        Raises:
            moe_graph.ops.OpError: an op refuses its arguments; the graph is as it was.
        """
        try:
            self._make_nodes()
        except Exception:
            self._emit.undo()
            raise

    def connect(self) -> None:
        """Let what stays read the new nodes."""
        ending = self._proved.ending
        self._remember([*self.replacements, *ending.served], self._proved.body)
        for old, new in self.replacements.items():
            old.replace_all_uses_with(new)
        ending.serve(self.total)
        for node in self._proved.body:
            for old, new in self._operands.items():
                node.replace_input_with(old, new)
            self._emit.mark(node)

    def restore(self) -> None:
        """Let everything read the old nodes again, and take the new ones out."""
        for node, (args, kwargs) in self._before.items():
            node.args, node.kwargs = args, kwargs
        for node in self._proved.body:
            self._emit.unmark(node)
        self._emit.undo()

    def erase(self) -> None:
        """Erase what fell away."""
        for node in reversed(self._graph.nodes):
            if node in self._proved.dead:
                self._graph.erase_node(node)

    def _remember(self, replaced: Iterable[Node], body: Iterable[Node]) -> None:
        new = set(self._emit.nodes)
        readers = {user for node in replaced for user in node.users} | set(body)
        self._before = {node: (node.args, node.kwargs) for node in (readers | new)}

    @abstractmethod
    def _make_nodes(self) -> None:
        """Make the new nodes, and note what each takes the place of."""
