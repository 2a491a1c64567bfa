"""Captured layers for changes to work on, and how to run a graph of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.passes.families import FAMILIES
from tests.passes.families import HIDDEN as FAMILY_HIDDEN
from tests.passes.forms import SORTED
from tests.passes.handwritten import HIDDEN, TOKENS, HandwrittenMoe
from tests.passes.styles import STYLES

KINDS = {"P1": "sorted", "P2": "sorted", "P4": "loop", "P5": "loop", "P6": "gathered"}
"""Class of pattern -> kind of layer; the others are of the kind ``other``."""


@dataclass
class Layer:
    """A captured layer.

    Attributes:
        name: of the layer.
        kind: ``sorted``, ``loop``, ``gathered`` or ``other``.
        gm: its dynamo graph.
        inputs: of the graph.
    """

    name: str
    kind: str
    gm: GraphModule
    inputs: list[Any]


def captured(name: str, kind: str, module: nn.Module, x: Tensor, dynamic: bool) -> Layer:
    found: list[Layer] = []

    def record(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        copies = [copied(x) for x in inputs]
        found.append(Layer(name, kind, copy.deepcopy(gm), copies))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(module, backend=record, fullgraph=True, dynamic=dynamic)(x)
    return found[0]


def layers(dynamic: bool) -> list[Layer]:
    """Return families of transformers, spellings of the sorted form, and all styles."""
    families = [
        captured(f.model, "sorted", f.build().eval(), torch.randn(2, 9, FAMILY_HIDDEN), dynamic)
        for f in FAMILIES
        if f.model in ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe")
    ]
    forms = [
        captured(f"form-{i}", "sorted", HandwrittenMoe(**pieces), _rows(), dynamic)
        for i, pieces in enumerate(SORTED)
        if i % 2 == 0
    ]
    styles = [
        captured(
            s.name,
            KINDS.get(s.pattern, "other"),
            s.build(),
            s.tokens(12),
            dynamic,
        )
        for s in STYLES
        if s.needs != "prepare"
    ]
    return [*families, *forms, *styles]


def _rows() -> Tensor:
    return torch.randn(TOKENS, HIDDEN)


def copied(value: Any) -> Any:
    """Return an input of a graph to run it with: fresh, with a gradient, a number for a symbol."""
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def results(layer: Layer, gm: GraphModule) -> tuple[list[Any], list[Tensor | None]]:
    """Run a graph on the inputs of `layer`; return its outputs and the gradients of its inputs."""
    inputs = [copied(x) for x in layer.inputs]
    outputs = gm(*[x.clone() if isinstance(x, Tensor) else x for x in inputs])
    gradient = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1))
    outputs[0].backward(gradient)
    return list(outputs), [x.grad if isinstance(x, Tensor) else None for x in inputs]
