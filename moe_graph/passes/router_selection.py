"""Which experts a router chooses, read backwards from the ids.

::

    ids = topk(masked, K)[1]             one choice of K, of any order among equals
    ids = argmax(scores, -1, True)       the same with K = 1, as max(-1, True)[1]

becomes ``Selection(choice, ranking, groups)``. Ids that several choices make (two argmax and a cat,
sparsemixer), or that anything changes after the choice, are no such selection.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.canonical import Call, is_complete
from moe_graph.passes.facts import Root
from moe_graph.passes.misses import Miss
from moe_graph.passes.router_groups import Groups, read_groups
from moe_graph.passes.router_scores import Ranking, Scores, read_ranking
from moe_graph.passes.router_values import Values, is_last_dim


@dataclass(frozen=True, eq=False)
class Selection:
    """The k largest of a ranking.

    Attributes:
        root: the ids.
        choice: the call that chooses.
        ranked: what made the scores that it chooses by, masked where groups take no part.
        ranking: what the scores are made of.
        groups: which groups take part, or None.
        doubt: why the scores are taken for logits though they look like more, or None.
    """

    root: Root
    choice: Call
    ranked: Call
    ranking: Ranking
    groups: Groups | None
    doubt: Miss | None = None

    @property
    def ids(self) -> Node:
        """The ids of the chosen experts."""
        return self.root.ids

    @property
    def scores(self) -> Scores:
        """The scores in the ranking."""
        return self.ranking.scores

    @property
    def is_plain(self) -> bool:
        """Whether the choice is by the scores alone."""
        return self.ranking.bias is None and self.groups is None


def read_selection(values: Values, root: Root) -> Selection | Miss:
    """Return the choice that made the ids of `root`."""
    made = values.call(root.ids)
    choice = values.call(made["input"]) if made.op == "result" else made
    ranked = values.operand(choice, "input", detached=True) if _chooses(made, choice) else None
    if ranked is None:
        return Miss(
            "router-choice",
            root.ids,
            root,
            lambda: f"ids that {choice.op} makes",
            "the indices of one topk, max or argmax over the last dimension, largest first",
        )
    doubt: Miss | None = None
    grouped = read_groups(values, ranked, root)
    if isinstance(grouped, Miss):
        doubt, grouped = grouped, None
    ranking, groups = grouped or (read_ranking(values, ranked, root), None)
    if isinstance(ranking, Miss) or doubt is not None or ranking is None:
        doubt = ranking if isinstance(ranking, Miss) else doubt
        ranking = Ranking(ranked, Scores(ranked, None, choice["input"], choice.node))
    return Selection(root, choice, ranked, ranking, groups, doubt)


def _chooses(made: Call, choice: Call) -> bool:
    """Tell whether `made` are the indices that `choice` makes along the last dimension."""
    if not is_complete(choice):
        return False
    if made.op == "result":
        op = "topk" if choice.op == "topk" else "max"
        fits = choice.op == op and made["index"] == 1
        fits = fits and (choice["largest"] is True if op == "topk" else bool(choice["keepdim"]))
    else:
        fits = made.op == "argmax" and bool(made["keepdim"])
    return fits and meta.is_tensor(choice["input"]) and is_last_dim(choice["dim"], choice["input"])
