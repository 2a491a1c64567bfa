"""A backend that frontends serve: keeps the graphs it gets, and runs them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_graph.frontends import capture


class Graphs(list[torch.fx.GraphModule]):
    """The graphs of what was compiled with it.

    Attributes:
        refusing: dynamo is sent back where data-dependent sizes are in the graph.
    """

    moe_graph_frontends = True

    def __init__(self, refusing: bool = False) -> None:
        super().__init__()
        self.refusing = refusing
        capture.install()

    def __call__(self, gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        capture.note_captured(gm)
        if self.refusing:
            capture.refuse_leftovers(gm)
        self.append(gm)
        return gm.forward

    def __hash__(self) -> int:
        return id(self)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `function` compiled with this backend."""
        return torch.compile(function, backend=self, **options)


def number_of_graphs(function: Callable[..., Any], *args: Any) -> int:
    """Return how many graphs torch.compile makes by itself."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    torch._dynamo.reset()
    return len(graphs)
