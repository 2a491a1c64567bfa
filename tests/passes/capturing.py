"""Capture a dynamo graph, rewrite it, run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_graph.config import Config
from moe_graph.float_inputs import make_constant
from moe_graph.frontends import capture as frontends_capture
from moe_graph.passes import rewrite_moe_layers
from moe_graph.report import LayerReport


@dataclass
class Capture:
    """What the passes did to the graphs of one function.

    Attributes:
        layers: reports of all graphs.
        before: printed nodes of each graph before the passes.
        after: printed nodes of each graph after them.
        ops: calls of each graph after the passes, by name.
        config: settings of the passes.
    """

    layers: list[LayerReport] = field(default_factory=list)
    before: list[list[str]] = field(default_factory=list)
    after: list[list[str]] = field(default_factory=list)
    modules: list[torch.fx.GraphModule] = field(default_factory=list)
    config: Config = field(default_factory=Config)

    @property
    def ops(self) -> Counter[str]:
        """Calls of all graphs after the passes, by name."""
        return Counter(
            name_of(node)
            for gm in self.modules
            for node in gm.graph.nodes
            if node.op.startswith("call")
        )

    def backend(self, gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        """Rewrite a graph and run it as it is, with eager autograd."""
        make_constant(gm)
        self.before.append([node.format_node() or node.name for node in gm.graph.nodes])
        self.layers += rewrite_moe_layers(gm, self.config)
        self.after.append([node.format_node() or node.name for node in gm.graph.nodes])
        self.modules.append(gm)
        return gm.forward


class Served:
    """A backend for which frontends may change what is traced."""

    moe_graph_frontends = True

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        frontends_capture.install()

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        frontends_capture.note_captured(gm)
        return self.backend(gm, inputs)


def name_of(node: torch.fx.Node) -> str:
    """Return the short name of what a node calls."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return node.target if isinstance(node.target, str) else node.target.__name__


def compile_rewritten(
    function: Callable[..., Any],
    dynamic: bool | None = None,
    fullgraph: bool = True,
    config: Config | None = None,
    frontends: bool = False,
) -> tuple[Callable[..., Any], Capture]:
    """Return `function` compiled with the passes and nothing else, and what they did.

    With `frontends` dynamo traces what it traces for the backend of moe_graph.
    """
    torch._dynamo.reset()
    capture = Capture(config=config or Config())
    backend = Served(capture.backend) if frontends else capture.backend
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    return compiled, capture


def result_and_gradients(
    function: Callable[..., Any], module: torch.nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the first output of `function` and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    result = function(x)
    result = result[0] if isinstance(result, tuple) else result
    torch.manual_seed(1)
    result.backward(torch.randn(result.shape, dtype=result.dtype).to(result.device))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return result.detach(), gradients | {"input": x.grad}
