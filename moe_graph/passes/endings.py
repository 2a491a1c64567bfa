"""Where the sum of a layer is, once it is complete: a node of its own, or a tensor written to.

::

    out = y[inverse].view(T, K, H).sum(1)          end = sum
    out = zeros.index_add(0, token, rows)          end = index_add
    out = shared.index_add(0, token, rows)         end = index_add, base = shared
    out = zeros; out.index_add_(0, token, rows)    end = index_add_, written = zeros

After a write in place, readers of the tensor read the sum: they are the ones to serve.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.facts import Combined
from moe_graph.passes.misses import Miss


@dataclass(frozen=True, eq=False)
class Ending:
    """The end of one layer.

    Attributes:
        end: node that completes the sum.
        base: tensor that the rows are added onto, None for zeros.
        written: tensor that the sum is written to in place, None for a pure sum.
        later: nodes behind `end` that read `written`.
    """

    end: Node
    base: Node | None = None
    written: Node | None = None
    later: list[Node] = field(default_factory=list)

    @property
    def result(self) -> Node:
        """The node that holds the sum behind `end`."""
        return self.end if self.written is None else self.written

    @property
    def served(self) -> dict[Node, set[Node]]:
        """Users, by node, that will read another node in its place."""
        return {} if self.written is None else {self.written: set(self.later)}

    def serve(self, total: Node) -> None:
        """Let everything that reads the sum read `total`."""
        self.end.replace_all_uses_with(total)
        for user in self.later:
            assert self.written is not None
            user.replace_input_with(self.written, total)


def ending_of(facts: Facts, total: Node, combined: Combined) -> Ending:
    """Return the end of the layer whose sum `total` completes.

    It is a cast back to the dtype of the rows where that alone reads a pure sum.
    """
    written = facts.calls[total].writes
    while written is not None and facts.calls[written].writes is not None:
        written = facts.calls[written].writes
    if written is not None:
        end = facts.position[total]
        later = [user for user in written.users if facts.position[user] > end]
        return Ending(total, combined.base, written, later)
    return Ending(_cast_back(facts, total, combined.contribution.rows), combined.base)


def _cast_back(facts: Facts, total: Node, rows: Node) -> Node:
    users = list(total.users)
    if len(users) != 1 or not meta.is_tensor(users[0]):
        return total
    cast = facts.calls[users[0]]
    returns = cast.op == "cast" and cast.known and meta.dtype(cast.node) == meta.dtype(rows)
    return cast.node if returns and facts.grad[cast.node] == facts.grad[total] else total


def other_reader(facts: Facts, ending: Ending, dead: set[Node], combined: Combined) -> Miss | None:
    """Check that nothing that stays sees the tensor that the sum was written to in place."""
    written, last = ending.written, facts.position[ending.end]
    if written is None:
        return None
    for alias in facts.memory.sharing(written):
        if alias is written or facts.position[alias] > last or alias in dead:
            continue
        return _miss(combined, alias, f"{alias.name} may share memory with {written.name}")
    first = min((facts.position[n] for n in written.users if facts.calls[n].writes), default=last)
    for user in written.users:
        if first < facts.position[user] <= last and user not in dead:
            return _miss(combined, user, f"{user.name} reads the sum before it is complete")
    return None


def _miss(combined: Combined, node: Node, got: str) -> Miss:
    return Miss(
        "in-place-write",
        node,
        combined.root,
        got,
        "a sum in place that nothing else reads until it is complete",
        "add to a new tensor: out = out.index_add(0, token, rows)",
    )
