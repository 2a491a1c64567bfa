"""Serves transformers' ``eager`` experts in a form that dynamo can trace, for moe_graph only.

The experts classes of transformers 5 ask a registry which implementation to run. ``"eager"`` is
not in it: it stands for the class's own forward, a loop over the experts that were hit, on which
dynamo breaks whatever its flags. While dynamo traces for moe_graph, and never else, the registry
answers with transformers' own grouped implementation, which computes the same and honours every
option of the class (gate, bias, layout of the weights, norm, expert parallelism)::

    before   one_hot, nonzero | for e in hit: where, index, linear, ... | index_add_
    after    sort, histc, cumsum, index, grouped_mm, ..., sum            (one graph)

A class, a model or a config is not touched. An ``"eager"`` entry that a user registers is obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moe_graph.frontends.tracing import tracing_for_moe_graph

_REGISTRY = "transformers.integrations.moe"
_SERVED = "_moe_graph_serves_eager"


def serve_eager_experts() -> None:
    """Have the registry of transformers serve ``eager`` while dynamo traces for moe_graph.

    Does nothing before a model of transformers is imported, nor when called again.
    """
    module = sys.modules.get(_REGISTRY)
    interface: Any = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    grouped = getattr(module, "grouped_mm_experts_forward", None)
    ask = getattr(interface, "get_interface", None)
    if grouped is None or ask is None or hasattr(interface, _SERVED):
        return

    def get_interface(
        experts_implementation: str | None, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        if (
            experts_implementation == "eager"
            and "eager" not in interface
            and tracing_for_moe_graph()
        ):
            return grouped
        return ask(experts_implementation, default)

    # On the instance: registries derived from it, as that of fp8 weights, stay as they are.
    interface.get_interface = get_interface
    setattr(interface, _SERVED, True)
