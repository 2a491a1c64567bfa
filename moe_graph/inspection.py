"""Look at a model without running it: what would be rewritten, and which ops have no lowering.

``explain`` compiles a model all the way to GE graphs and hands back zeros in place of results.
``Doctor`` stops before conversion and lists every op that TorchAir could not convert.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from moe_graph.backend import MoeGraphBackend
from moe_graph.config import Config
from moe_graph.converters.coverage import MissingLowering, missing_lowerings
from moe_graph.report import Report


def explain(
    model: Callable[..., Any], *args: Any, config: Config | None = None, **kwargs: Any
) -> Report:
    """Compile `model` for these arguments, run nothing on the device, return the report.

    Args:
        model: module or function.
        args: positional arguments of one call.
        config: settings; None takes the defaults. A kept layer is reported, never raised.
        kwargs: keyword arguments of that call.

    Returns:
        The report of every graph that the call compiles. Where the model breaks into several
        graphs, later ones are traced on zeros in place of the earlier ones' results.
    """
    backend = _CompileOnly(dataclasses.replace(config or Config(), on_miss="ignore"))
    torch.compile(model, backend=backend)(*args, **kwargs)
    return backend.report


class _CompileOnly(MoeGraphBackend):
    """Compiles like its parent; what it returns makes zeros of the right shapes."""

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        super().__call__(gm, example_inputs, **options)
        return lambda *args: _zeros_like_outputs(gm, args)


def _zeros_like_outputs(gm: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args = tree_map_only(torch.Tensor, mode.from_tensor, tuple(args))
        outputs = gm(*fake_args)
    return tree_map_only(
        torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), outputs
    )


class Doctor(MoeGraphBackend):
    """A backend that converts nothing: it lists the ops without a lowering and runs eagerly.

    Attributes:
        missing: ops without a lowering of all graphs so far, forward and backward.
    """

    def __init__(self) -> None:
        super().__init__(Config(on_miss="ignore"))
        self.missing: list[MissingLowering] = []

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compile one dynamo graph to ATen, look at its ops, return the ATen graph to run."""

        def examine(aten_gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.missing.extend(missing_lowerings(aten_gm))
            return aten_gm.forward

        return self.compile(gm, example_inputs, options, convert=examine)


@contextlib.contextmanager
def every_compile_uses(backend: MoeGraphBackend) -> Iterator[None]:
    """Within this context ``torch.compile`` uses `backend`, whatever backend its caller names."""
    original = torch.compile

    def compile_with_ours(model: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("mode", None)
        kwargs.pop("options", None)
        kwargs["backend"] = backend
        if model is None:
            return lambda function: original(function, **kwargs)
        return original(model, **kwargs)

    torch.compile = compile_with_ours
    try:
        yield
    finally:
        torch.compile = original
