"""What was found, what it became, where, and why a layer was left alone.

A :class:`Report` holds one :class:`LayerReport` per MoE layer that a backend has looked at. A kept
layer carries :class:`Reason` records: the check that failed, at which node and source line, what
was there, what was wanted, and what the user can do. The passes write it; nothing reads it to
decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["rewritten", "kept"]


@dataclass(frozen=True)
class Reason:
    """Why a layer was kept.

    Attributes:
        check: short stable name of the check that failed, for example ``"one-permutation"``.
        node: name of the FX node at which it failed.
        source: ``file:line`` of the model code that made the node, empty when unknown.
        got: what was found there.
        want: what the rewrite needs.
        hint: what the user can do about it, empty when nothing is known to help.
    """

    check: str
    node: str
    source: str
    got: str
    want: str
    hint: str = ""

    def __str__(self) -> str:
        place = f" ({self.source})" if self.source else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.check} at {self.node}{place}: got {self.got}, want {self.want}{hint}"


@dataclass
class LayerReport:
    """One MoE layer.

    Attributes:
        path: module path, for example ``"model.layers.0.mlp.experts"``.
        source: ``file:line`` of the model code, empty when unknown.
        status: ``"rewritten"`` or ``"kept"``.
        form: how the experts are written, for example ``"sorted-grouped"``; empty when unknown.
        router: how the ids are made, for example ``"softmax-topk"``; empty when unknown.
        reasons: why it was kept; empty for a rewritten layer.
        fx_nodes_before: FX nodes of the region before the rewrite.
        fx_nodes_after: FX nodes of the region after it, equal to `fx_nodes_before` when kept.
        ge_nodes: GE op type -> number of nodes that the region became, forward and backward;
            empty until the graph is converted.
        graph: number of the dynamo graph that holds the layer, in order of compilation.
        router_op: GE type of the op that computes the router of a rewritten layer, for example
            ``"MoeGatingTopK"``; empty where the router stays as the source has it.
        router_reasons: why the router stays; empty where an op computes it, the layer is kept, or
            ``Config(fuse_routers="none")`` asks for no op.
    """

    path: str
    source: str
    status: Status
    form: str = ""
    router: str = ""
    reasons: list[Reason] = field(default_factory=list)
    fx_nodes_before: int = 0
    fx_nodes_after: int = 0
    ge_nodes: dict[str, int] = field(default_factory=dict)
    graph: int = 0
    router_op: str = ""
    router_reasons: list[Reason] = field(default_factory=list)


class KeptLayerError(RuntimeError):
    """A MoE layer was not rewritten and ``Config(on_miss="error")`` asked for an error.

    Attributes:
        layer: the layer's report.
    """

    def __init__(self, layer: LayerReport) -> None:
        self.layer = layer
        reasons = "\n".join(f"  - {reason}" for reason in layer.reasons)
        super().__init__(f"MoE layer {layer.path} ({layer.source}) was not rewritten:\n{reasons}")


@dataclass
class Report:
    """All layers that one backend has looked at, in order of compilation.

    Attributes:
        layers: see :class:`LayerReport`.
        graphs: number of dynamo graphs that were compiled, with and without MoE layers.
    """

    layers: list[LayerReport] = field(default_factory=list)
    graphs: int = 0

    @property
    def rewritten(self) -> list[LayerReport]:
        """The layers that became fused routing ops."""
        return [layer for layer in self.layers if layer.status == "rewritten"]

    @property
    def kept(self) -> list[LayerReport]:
        """The layers that were left as they came."""
        return [layer for layer in self.layers if layer.status == "kept"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: ``{"graphs": int, "layers": [{...}, ...]}``, fields as documented."""
        return {"graphs": self.graphs, "layers": [asdict(layer) for layer in self.layers]}

    def to_json(self) -> str:
        """Return :meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from moe_graph.report_table import render

        return render(self)


def first_reasons(layers: Iterable[LayerReport]) -> list[str]:
    """Return one line per kept layer, for a log."""
    return [
        f"{layer.path}: {layer.reasons[0] if layer.reasons else 'no reason recorded'}"
        for layer in layers
        if layer.status == "kept"
    ]
