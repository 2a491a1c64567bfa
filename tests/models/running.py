"""Runs a model eagerly on the CPU, where nothing of moe_graph is in it, and compiled on the NPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_graph


@dataclass(frozen=True)
class Step:
    """One training step, all on the CPU.

    Attributes:
        loss: a number.
        logits: [batch, tokens, vocabulary].
        gradients: of every parameter that received one.
    """

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def infer(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the logits, on the CPU."""
    with torch.no_grad():
        return model(ids).logits.cpu()


def train(model: Any, ids: Tensor) -> Step:
    """Return the outcome of a forward and a backward; the gradients start from none."""
    model.zero_grad(set_to_none=True)
    output = model(ids, labels=ids)
    output.loss.backward()
    gradients = {
        name.removeprefix("_orig_mod."): parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Step(output.loss.detach().cpu(), output.logits.detach().cpu(), gradients)


def compile_on_npu(
    model: torch.nn.Module, *, dynamic: bool | None = False, **config: Any
) -> tuple[Any, moe_graph.backend.MoeGraphBackend]:
    """Move `model` to the NPU; return it compiled as one graph, and its backend."""
    backend = moe_graph.npu_backend(moe_graph.Config(**config))
    return torch.compile(model.npu(), backend=backend, fullgraph=True, dynamic=dynamic), backend


def assert_gradients_close(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    """Compare gradients by name: the largest difference over the largest value of each."""
    assert got.keys() == want.keys()
    errors = {
        name: ((got[name] - want[name]).abs().max() / want[name].abs().max()).item()
        for name in want
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= limit, f"{worst}: {errors[worst]}"
