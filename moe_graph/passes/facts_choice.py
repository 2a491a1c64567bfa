"""Experts that choose tokens: layers that no routing op serves, named in the report.

::

    weights, token = scores.t().topk(C)         each expert chooses C tokens
    x[token]                                    ChosenTokens [E, C, H]
    bmm(x[token], w)                            the check "expert-choice" fails

Their rows are gathered by a top-k over the tokens, as many for each expert: what MoeInitRoutingV2
would do is done already, and the products are dense.
"""

from __future__ import annotations

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts, rule_of
from moe_graph.passes.canonical import Call
from moe_graph.passes.misses import Miss
from moe_graph.passes.side_facts import ChosenTokens


def chosen_tokens(facts: Facts, source: Node, index: Node) -> ChosenTokens | None:
    """Return what ``x[token]`` is where `token` is a top-k over the rows of `x`."""
    chosen, dims = facts.calls.get(index), meta.shape(source)
    if chosen is None or chosen.op != "result" or chosen["index"] != 1 or len(dims) != 2:
        return None
    choice = facts.calls.get(chosen["input"])
    if choice is None or choice.op != "topk" or len(meta.shape(index)) != 2:
        return None
    last = meta.wrap_dim(choice["dim"], 2) == 1
    rows = meta.shape(choice["input"])[-1]
    return ChosenTokens(index) if last and meta.same_dim(rows, dims[0]) else None


@rule_of(ChosenTokens)
def _product(call: Call, facts: Facts) -> Miss | None:
    fact = facts.aside(call.get("input"))
    if not isinstance(fact, ChosenTokens) or call.op not in ("bmm", "matmul"):
        return None
    weight = call["mat2"] if call.op == "bmm" else call["other"]
    dims, experts = meta.shape(weight), meta.shape(fact.ids)[0]
    if len(dims) != 3 or not isinstance(dims[0], int) or dims[0] < 2 or dims[0] != experts:
        return None
    return Miss(
        "expert-choice",
        call.node,
        None,
        lambda: f"experts that choose tokens ({fact.ids.name})",
        "tokens that choose experts",
        "nothing is to be done: the rows are gathered and multiplied densely already",
    )
