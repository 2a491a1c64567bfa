"""Put one routing op in place of a router.

Before::

    scores = logits.sigmoid();  masked = (scores + bias) masked by groups
    ids = topk(masked, 8)[1];  w = scores.gather(1, ids)
    w = w / (w.sum(-1, True) + 1e-20) * 2.5

After::

    y, expert_idx, _ = moe_graph.moe_gating_top_k(logits, bias, k=8, group_count=8, k_group=4, ...)
    ids = expert_idx.to(int64);  w = y

Layers read their ids as int32, so that the cast to int64 is made only for what else reads them.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_graph.passes import meta
from moe_graph.passes.canonical import canonical
from moe_graph.passes.emit import Emitter, Results
from moe_graph.passes.router_plan import RANKS, TORCH_OPS, Plan
from moe_graph.passes.router_region import redirected_uses
from moe_graph.passes.router_values import Values


class RouterRewrite:
    """The rewrite of one router.

    Args:
        graph: graph of the router.
        values: its values.
        plan: what to do.
        path: module path of the layer that the router belongs to.
        results: example values that are known from other calls.

    Attributes:
        expert_idx: the new ids, int32.
        weights: old weights -> new ones.
    """

    expert_idx: Node
    weights: dict[Node, Node]

    def __init__(
        self, graph: Graph, values: Values, plan: Plan, path: str, results: Results
    ) -> None:
        self._graph = graph
        self._values = values
        self._plan = plan
        self._emit = Emitter(graph, path, results)

    @property
    def nodes(self) -> list[Node]:
        """The new nodes, in the order of their making."""
        return self._emit.nodes

    def prepare(self) -> None:
        """Make the op beside the old nodes.

        Raises:
            moe_graph.ops.OpError: the op refuses its arguments; the graph is as it was.
        """
        try:
            self._make_op()
        except Exception:
            self._emit.undo()
            raise

    def undo(self) -> None:
        """Take the op that was prepared out again."""
        self._emit.undo()

    def apply(self) -> None:
        """Use the op in place of the old nodes, and erase what falls away."""
        plan = self._plan
        for old, new in self.weights.items():
            for user, alias in redirected_uses(self._values, old):
                if user not in plan.dead:
                    user.replace_input_with(alias, new)
        self._give_ids()
        for node in reversed(self._graph.nodes):
            if node in plan.dead:
                self._graph.erase_node(node)

    def _make_op(self) -> None:
        plan, at = self._plan, self._plan.at
        ids = plan.selection.ids
        shape = meta.shape(ids)
        x = self._emit.cast(plan.logits, plan.dtype, at=at)
        if len(shape) > RANKS[plan.ge_type]:
            x = self._emit.reshape(x, (-1, meta.shape(x)[-1]), at=at)
        bias = plan.bias
        if bias is not None:
            bias = self._emit.cast(bias, plan.dtype, at=at)
            if len(meta.shape(bias)) != 1:
                bias = self._emit.reshape(bias, (-1,), at=at)
        # MoeGatingTopK also takes token ids and a table of experts, the others finished rows.
        args = (x, bias, None, None) if plan.ge_type == "MoeGatingTopK" else (x, None)
        target = TORCH_OPS[plan.ge_type]
        name = target._schema.name.partition("::")[2]
        op = self._emit.call(target, args, plan.attributes, at=at, name=name)
        self.expert_idx = self._item(op, 1, "expert_idx")
        y = self._item(op, 0, "y") if plan.weights else None
        self.weights = {}
        for old in plan.weights:
            assert y is not None
            new = self._emit.cast(y, meta.dtype(old), at=at)
            if self._values.written(old, old):
                # Autograd lets nobody write what a custom op returns.
                new = self._emit.call(torch.ops.aten.clone.default, (new,), at=at, name="weights")
            self.weights[old] = new

    def _item(self, op: Node, index: int, name: str) -> Node:
        """Take one result of the op, in the shape that the source has it in."""
        at = self._plan.at
        item = self._emit.item(op, index, at=at, name=name)
        shape = meta.shape(self._plan.selection.ids)
        if len(meta.shape(item)) == len(shape):
            return item
        unknown = [place for place, dim in enumerate(shape) if not isinstance(dim, int)]
        dims = tuple(-1 if place in unknown else dim for place, dim in enumerate(shape))
        return self._emit.reshape(item, dims, at=at)

    def _give_ids(self) -> None:
        plan = self._plan
        ids = plan.selection.ids
        wide: Node | None = None
        for user in list(ids.users):
            if user in plan.dead:
                continue
            call = canonical(user)
            if call.op == "cast" and meta.dtype(user) is torch.int32 and call.known:
                user.replace_all_uses_with(self.expert_idx)
                self._graph.erase_node(user)
                continue
            if wide is None:
                wide = self._emit.cast(self.expert_idx, meta.dtype(ids), at=plan.at)
            user.replace_input_with(ids, wide)
