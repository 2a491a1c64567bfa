"""The pass over one graph module and the checkpoint bodies inside it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from moe_graph.config import Config
from moe_graph.ops import OpError
from moe_graph.passes import rules  # noqa: F401  registers the transfer rules
from moe_graph.passes.analysis import Facts
from moe_graph.passes.dense_layer import DenseLayer
from moe_graph.passes.emit import Results
from moe_graph.passes.layer import Layer
from moe_graph.passes.loop_layer import LoopLayer
from moe_graph.passes.misses import Miss
from moe_graph.passes.recognise import Kept, find_layers
from moe_graph.passes.rewrite import LayerRewrite
from moe_graph.passes.rewrite_dense import DenseRewrite
from moe_graph.passes.rewrite_loop import LoopRewrite
from moe_graph.passes.rewriting import Rewrite
from moe_graph.passes.router_pass import rewrite_routers
from moe_graph.passes.routers import router_name
from moe_graph.passes.simplify import simplified
from moe_graph.passes.verify import Verifier
from moe_graph.provenance import module_path, source_line
from moe_graph.report import LayerReport


def rewrite_graph(gm: GraphModule, config: Config) -> list[LayerReport]:
    """Rewrite the layers of `gm` and of its checkpoint bodies; see ``rewrite_moe_layers``."""
    return _rewrite_graph(gm, config, Results())


def _rewrite_graph(gm: GraphModule, config: Config, results: Results) -> list[LayerReport]:
    reports: list[LayerReport] = []
    for body in checkpoint_bodies(gm):
        reports += _rewrite_graph(body, config, results)
    original = gm.graph
    simpler = simplified(original)
    if simpler is not None:
        gm.graph = simpler
    facts = Facts(gm.graph)
    verifier = Verifier(gm) if config.verify else None
    # From the last to the first: what a layer reads may be the result of an earlier one.
    looked_at = list(reversed(find_layers(gm.graph, facts)))
    own = [
        _kept(facts, found)
        if isinstance(found, Kept)
        else _rewrite(gm, facts, found, verifier, results)
        for found in looked_at
    ]
    rewritten = [
        (layer.root, report)
        for layer, report in zip(looked_at, own, strict=True)
        if not isinstance(layer, Kept) and report.status == "rewritten"
    ]
    rewrite_routers(gm, facts, rewritten, config, results)
    reports += reversed(own)
    if any(report.status == "rewritten" for report in own):
        gm.graph.lint()
        gm.recompile()
    elif simpler is not None:
        gm.graph = original
    return reports


def checkpoint_bodies(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the bodies of the activation checkpoints of a graph, each once."""
    seen: set[int] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or "checkpoint" not in getattr(node.target, "__name__", ""):
            continue
        for source in node.all_input_nodes:
            body = getattr(gm, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(body, GraphModule) and id(body) not in seen:
                seen.add(id(body))
                yield body


def _rewrite(
    gm: GraphModule,
    facts: Facts,
    layer: Layer | LoopLayer | DenseLayer,
    verifier: Verifier | None,
    results: Results,
) -> LayerReport:
    path = module_path(layer.anchor)
    router = router_name(facts, layer.root)
    rewrite: Rewrite
    if isinstance(layer, LoopLayer):
        rewrite = LoopRewrite(gm.graph, facts, layer, path, results)
    elif isinstance(layer, DenseLayer):
        rewrite = DenseRewrite(gm.graph, facts, layer, path, results)
    else:
        rewrite = LayerRewrite(gm.graph, facts, layer, path, results)
    try:
        rewrite.prepare()
    except OpError as error:
        return _kept(facts, Kept(layer.anchor, _refused(layer, error)))
    report = LayerReport(
        path,
        source_line(layer.anchor),
        "rewritten",
        form=layer.form,
        router=router,
        fx_nodes_before=len(layer.body) + len(layer.dead),
        fx_nodes_after=len(layer.body) + len(rewrite.nodes),
    )
    if verifier is None:
        rewrite.connect()
    else:
        differs = verifier.check(layer, rewrite)
        if differs is not None:
            rewrite.restore()
            return _kept(facts, Kept(layer.anchor, _differs(layer, *differs)))
    rewrite.erase()
    return report


def _differs(layer: Layer | LoopLayer | DenseLayer, error: float, limit: float) -> Miss:
    return Miss(
        "verify",
        layer.ending.end,
        layer.root,
        f"results that differ by {error:.3g} on random inputs",
        f"at most {limit:.3g}",
        "this is a defect of moe_graph: please report the layer",
    )


def _refused(layer: Layer | LoopLayer | DenseLayer, error: OpError) -> Miss:
    return Miss(
        "op-limits",
        layer.ending.end,
        layer.root,
        f"{error.op} {error.argument} = {error.got}",
        error.want,
        error.hint,
    )


def _kept(facts: Facts, kept: Kept) -> LayerReport:
    root = kept.miss.root
    return LayerReport(
        module_path(kept.anchor),
        source_line(kept.anchor),
        "kept",
        router=router_name(facts, root) if root is not None else "",
        reasons=[kept.miss.reason()],
    )
