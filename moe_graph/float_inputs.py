"""Makes constants of the Python floats that dynamo passed to a graph as inputs.

With ``dynamic=True`` dynamo turns every float that a model reads, a norm's epsilon or the scale of
an attention, into an input: a 0-d fp64 tensor on the host. The graph engine returns all results on
the device, so such a scalar, saved for backward, would come back in the wrong place.

    s: Sym(zf0) = eps.item();  x + s        ->        x + 1e-6, guarded by eps == 1e-6

Dynamo has the means itself, for floats that PyTorch's own compiler cannot take as inputs: name the
symbols and start the trace again. The new trace holds the constants and the guards.
"""

from __future__ import annotations

import torch.fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState


def make_constant(gm: torch.fx.GraphModule) -> None:
    """Start the trace of `gm` again with its float inputs as constants, if it has any.

    Raises:
        TensorifyScalarRestartAnalysis: there are some; dynamo catches it.
    """
    symbols = [name for node in gm.graph.find_nodes(op="placeholder") if (name := _symbol(node))]
    fresh = [name for name in symbols if not TensorifyState.should_specialize(name)]
    for name in fresh:
        TensorifyState.specialize(name)
    if fresh:
        raise TensorifyScalarRestartAnalysis


def _symbol(placeholder: torch.fx.Node) -> str | None:
    """Return the symbol of the float that a host tensor input stands for, None for other inputs."""
    scalar = getattr(placeholder.meta.get("example_value"), "item_memo", None)
    return getattr(scalar.node._expr, "name", None) if isinstance(scalar, torch.SymFloat) else None
