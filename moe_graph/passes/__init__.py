"""Find eager MoE layers in a graph and put fused routing ops in their place.

Each stage reads what the stage before it found:

==================  ==================================================================
``simplify``        no-ops and what nobody reads leave the graph
``canonical``       one op name and argument list per node, whatever its spelling
``memory``          who shares memory, and when it is written
``analysis``        the walk; ``facts_*`` hold its rules, ``facts`` and ``side_facts`` what they say
``recognise``       layers out of facts, or the check that failed (``misses``)
``rewrite``         new nodes for a layer (``emit``), old ones erased (``region``)
``router_pass``     one op for the router of a rewritten layer (``router_*``), or why none
==================  ==================================================================
"""

from __future__ import annotations

import torch.fx

from moe_graph.config import Config
from moe_graph.ops import use_product
from moe_graph.passes.graph_pass import rewrite_graph
from moe_graph.report import LayerReport

__all__ = ["rewrite_moe_layers"]


def rewrite_moe_layers(gm: torch.fx.GraphModule, config: Config) -> list[LayerReport]:
    """Rewrite the MoE layers of a dynamo or ATen graph in place.

    Args:
        gm: graph whose nodes carry ``meta["example_value"]`` or ``meta["val"]``; activation
            checkpoint bodies inside it are rewritten too. It is recompiled if it changed.
        config: settings; ``verify`` makes every rewritten layer run against what it replaced.

    Returns:
        One report per MoE layer, rewritten or kept, in graph order. A graph in which no layer is
        rewritten stays as it was. Elsewhere no-ops and calls that nobody reads go, and else nothing
        outside the rewritten layers is touched.
    """
    with use_product(config.product):
        return rewrite_graph(gm, config)
