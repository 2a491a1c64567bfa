"""One tensor per expert, or the one tensor that all of them are parts of.

::

    w[0], w[1], ..., w[E - 1]              w
    w.unbind(0)[0], ...                    w
    w[0].t(), w[1].t(), ...                w, transposed
    w_0, w_1, ..., w_(E - 1)               a list
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.products import swaps_last_dims


@dataclass(frozen=True, eq=False)
class Stack:
    """Parameters of all experts.

    Attributes:
        views: what the loop reads, one tensor per expert.
        parts: the same without a swap of dimensions.
        table: ``[E, ...]`` that holds them, None when nothing does.
        transposed: the loop reads them with their two dimensions swapped.
    """

    views: list[Node]
    parts: list[Node]
    table: Node | None
    transposed: bool

    @property
    def sources(self) -> list[Node]:
        """What a grouped product reads in place of the views."""
        return self.parts if self.table is None else [self.table]


def stack_of(facts: Facts, nodes: list[Node]) -> Stack:
    """Return the parameters behind one view per expert; `nodes` are in the order of experts."""
    transposed = all(swaps_last_dims(facts.calls[node]) for node in nodes)
    parts = [facts.calls[node]["input"] for node in nodes] if transposed else nodes
    tables = {_table(facts, part, expert) for expert, part in enumerate(parts)}
    table = tables.pop() if len(tables) == 1 else None
    whole = table is not None and meta.same_dim(meta.shape(table)[0], len(parts))
    return Stack(nodes, parts, table if whole else None, transposed)


def _table(facts: Facts, part: Node, expert: int) -> Node | None:
    """Return the tensor that `part` is entry `expert` of, along the first dimension."""
    call = facts.calls[part]
    if call.writes is not None:
        return None
    source: Node | None = None
    if call.op == "select":
        first = meta.wrap_dim(call["dim"], len(meta.shape(call["input"]))) == 0
        source = call["input"] if first and call.literal("index") == expert else None
    elif call.op == "slice":
        rest = call["index"][1:]
        first = call["index"][0] == expert and not isinstance(call["index"][0], bool)
        source = call["input"] if first and all(item == slice(None) for item in rest) else None
    elif call.op == "result" and call["index"] == expert:
        unbind = facts.calls[call["input"]]
        dim = unbind.get("dim") or unbind.get("1") or 0
        source = unbind["input"] if unbind.op == "unbind" and dim == 0 else None
    return source if isinstance(source, Node) else None
