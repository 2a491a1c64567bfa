"""Lower the routers of rewritten layers to one op each, or say why one stays as it is."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moe_graph.config import Config
from moe_graph.ops import OpError
from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.emit import Results
from moe_graph.passes.facts import Root
from moe_graph.passes.misses import Miss
from moe_graph.passes.router_plan import Plan, plans_for
from moe_graph.passes.router_rewrite import RouterRewrite
from moe_graph.passes.router_scores import rounded_logits
from moe_graph.passes.router_selection import Selection, read_selection
from moe_graph.passes.router_values import Values
from moe_graph.passes.verify_router import RouterVerifier
from moe_graph.report import LayerReport, Reason


def rewrite_routers(
    gm: GraphModule,
    facts: Facts,
    rewritten: list[tuple[Root, LayerReport]],
    config: Config,
    results: Results,
) -> None:
    """Lower the routers of layers that were rewritten, and fill in their part of the reports.

    Args:
        gm: the graph module, all of whose layers are done.
        facts: what was found before they were.
        rewritten: the ids and the report of each layer that was.
        config: ``fuse_routers`` and ``verify`` count.
        results: example values that are known from other calls.
    """
    if not rewritten or config.fuse_routers == "none":
        return
    routers = _Routers(gm, facts, config, results)
    done: dict[Node, tuple[str, list[Reason]]] = {}
    for root, report in rewritten:
        if root.ids not in done:
            done[root.ids] = routers.rewrite(root, report)
        report.router_op, report.router_reasons = done[root.ids]


class _Routers:
    """The routers of one graph module."""

    def __init__(self, gm: GraphModule, facts: Facts, config: Config, results: Results) -> None:
        self._gm = gm
        self._values = Values(gm.graph, facts)
        self._verifier = RouterVerifier(gm, self._values) if config.verify else None
        self._takes_ties = config.fuse_routers == "all"
        self._results = results

    def rewrite(self, root: Root, report: LayerReport) -> tuple[str, list[Reason]]:
        """Return the GE type of the op that a router became, or why it became none."""
        selection = read_selection(self._values, root)
        if isinstance(selection, Miss):
            return "", [selection.reason()]
        misses: list[Miss] = []
        refused: list[Miss] = []
        for plan in plans_for(self._values, selection):
            if isinstance(plan, Miss):
                misses.append(plan)
                continue
            rounded = None if self._takes_ties else rounded_logits(self._values, selection.scores)
            if rounded is not None:
                return "", [_ties(selection, rounded).reason()]
            try:
                miss = self._apply(plan, report)
            except OpError as error:
                miss = _refused(plan, error)
            if miss is None:
                return plan.ge_type, []
            refused.append(miss)
        return "", [(refused or misses)[0].reason()]

    def _apply(self, plan: Plan, report: LayerReport) -> Miss | None:
        rewrite = RouterRewrite(self._gm.graph, self._values, plan, report.path, self._results)
        rewrite.prepare()
        differs = None if self._verifier is None else self._verifier.check(plan, rewrite)
        if differs is not None:
            rewrite.undo()
            return _differs(plan, *differs)
        rewrite.apply()
        self._values.note_change(rewrite.nodes, plan.at, plan.dead)
        report.fx_nodes_before += len(plan.dead)
        report.fx_nodes_after += len(rewrite.nodes)
        return None


def _ties(selection: Selection, rounded: Node) -> Miss:
    return Miss(
        "router-ties",
        rounded,
        selection.root,
        f"logits of {meta.dtype(rounded)}, some of which are equal",
        "float32 logits: of equal scores the op chooses the lower expert, torch.topk any",
        'compute the logits in float32, or set Config(fuse_routers="all")',
    )


def _differs(plan: Plan, error: float, limit: float) -> Miss:
    return Miss(
        "verify",
        plan.selection.choice.node,
        plan.selection.root,
        f"results of {plan.ge_type} that differ by {error:.3g} on random logits",
        f"at most {limit:.3g}",
        "this is a defect of moe_graph: please report the router",
    )


def _refused(plan: Plan, error: OpError) -> Miss:
    return Miss(
        "router-limits",
        plan.selection.choice.node,
        plan.selection.root,
        f"{error.op} {error.argument} = {error.got}",
        error.want,
        error.hint,
    )
