"""Lets dynamo put data-dependent shapes into a graph for moe_graph, with a way back.

A loop over experts that finds its tokens with ``torch.where(ids == e)`` becomes one graph only
with dynamo's capture flags. Set for good, they turn other programs into errors, and they leave
sizes in the graph that no lowering has. So each frame that dynamo traces for moe_graph is tried
with the flags first, and again without them where that does not end well:

    with flags     one graph, and nothing data-dependent is left after the passes: taken
                   dynamo fails or skips the frame, or something is left: not taken
    without flags  what torch.compile does by itself

With the flags, ``torch.bincount(ids, minlength=E)`` is taken to have E elements. That is so for the
ids of a top-k over E experts, and a layer is only rewritten if its ids are; a bincount that is left
after the passes is not taken.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
import torch.fx
from torch._dynamo import convert_frame
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_graph.frontends.breaks import broken_loops, places_of
from moe_graph.frontends.tracing import (
    Trace,
    current_trace,
    has_frontends,
    tracing,
    unwrapped,
)
from moe_graph.frontends.transformers_experts import serve_eager_experts
from moe_graph.report import KeptLayerError

logger = logging.getLogger("moe_graph")

_BINCOUNT = torch.ops.aten.bincount.default
_FLAGS = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


class CapturedInVainError(RuntimeError):
    """Data-dependent sizes are left in a graph after the passes; dynamo is to trace it without."""


@functools.cache
def install() -> None:
    """Have dynamo try frames with capture; later calls change nothing.

    Raises:
        RuntimeError: this version of dynamo traces frames in another way.
    """
    original = getattr(convert_frame, "compile_frame", None)
    if original is None:
        raise RuntimeError("torch._dynamo.convert_frame has no compile_frame; want torch 2.13")
    convert_frame.compile_frame = functools.wraps(original)(
        functools.partial(_compile_frame, original)
    )
    shapes = fake_impls.op_implementations_dict
    shapes[_BINCOUNT] = functools.partial(_shape_of_bincount, shapes[_BINCOUNT])


def note_captured(gm: torch.fx.GraphModule) -> None:
    """Tell the attempt under way that dynamo captured something in `gm`, if it did."""
    trace = current_trace()
    if trace is not None and has_data_dependent_sizes(gm):
        trace.mattered = True


def note_layers(found: bool) -> None:
    """Tell the attempt under way whether there are MoE layers in its graph."""
    trace = current_trace()
    if trace is not None:
        trace.found_layers |= found


def refuse_leftovers(gm: torch.fx.GraphModule) -> None:
    """Have dynamo trace the frame without capture if data-dependent sizes are left in `gm`.

    Raises:
        CapturedInVainError: they are, and dynamo can still trace without; or a bincount is left.
    """
    trace = current_trace()
    if trace is not None and trace.retries and has_data_dependent_sizes(gm):
        raise CapturedInVainError("data-dependent sizes are left in the graph")
    if trace is not None and trace.assumes_length and any(map(_is_bincount, gm.graph.nodes)):
        raise CapturedInVainError(
            "torch.bincount is left in the graph, and the data say how long its result is; without "
            "fullgraph=True it runs outside of the graph"
        )


def has_data_dependent_sizes(gm: torch.fx.GraphModule) -> bool:
    """Whether a value of the graph has a size, or is a number, that only the data decides."""
    return any(
        free_unbacked_symbols(node.meta["example_value"])
        for node in gm.graph.nodes
        if node.meta.get("example_value") is not None
    )


def _is_bincount(node: torch.fx.Node) -> bool:
    return node.target in ("bincount", torch.bincount, _BINCOUNT)


def _shape_of_bincount(
    original: Callable[..., Any],
    fake_mode: Any,
    func: Any,
    inputs: Any,
    weights: Any = None,
    minlength: Any = 0,
) -> Any:
    """Return the counts of ids below `minlength`; the arguments are those of a fake kernel."""
    trace = current_trace()
    if trace is None or not trace.captures or not isinstance(minlength, int) or minlength < 1:
        return original(fake_mode, func, inputs, weights, minlength)
    trace.assumes_length = trace.mattered = True
    dtype = torch.long if weights is None else torch.float64
    if weights is not None and weights.dtype == torch.float32:
        dtype = torch.float32
    return inputs.new_empty(minlength, dtype=dtype)


def _compile_frame(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace one frame; the arguments are those of dynamo's ``compile_frame``."""
    compiler_fn, one_graph = args[5], args[6]
    if not has_frontends(compiler_fn):
        with tracing(None):
            return original(*args, **kwargs)
    serve_eager_experts()  # Here, because models may be imported after the backend is made.
    if one_graph or kwargs.get("export"):  # dynamo captures by itself, and has no other way
        with tracing(Trace(captures=True)):
            return original(*args, **kwargs)
    attempt = Trace(captures=True, retries=True)
    try:
        with tracing(attempt), torch._dynamo.config.patch(_FLAGS):
            output = original(*args, **kwargs)
            _tell(compiler_fn, attempt, _end_of_graph(output))
            return output
    except BackendCompilerFailed as error:
        failure: Any = error.inner_exception
        if not attempt.mattered or isinstance(failure, KeptLayerError):
            raise
        if not isinstance(failure, CapturedInVainError):
            logger.warning(
                "compiled without the loops of %s in one graph, which failed: %s: %s",
                args[0].co_qualname,
                type(failure).__name__,
                str(failure).partition("\n")[0],
            )
    except Exception as error:
        failure = error  # Without capture dynamo meets it again, or it came from capture.
    output = None
    try:
        with tracing(Trace(captures=False)):
            output = original(*args, **kwargs)
            return output
    finally:
        _tell(compiler_fn, attempt, failure, _end_of_graph(output))


def _end_of_graph(output: Any) -> Any:
    """Return dynamo's reason for ending a graph before the frame does, None if it does not."""
    graph = getattr(getattr(output, "tracer_output", None), "output_graph", None)
    why = getattr(graph, "compile_subgraph_reason", None)
    return why if getattr(why, "graph_break", False) else None


def _tell(compiler_fn: Callable[..., Any], attempt: Trace, *breaks: Any) -> None:
    """Tell the backend of a break in a loop over experts, unless it has found the layer itself."""
    told = getattr(unwrapped(compiler_fn), "loop_broke", None)
    if told is None or attempt.found_layers:
        return
    for break_ in breaks:
        loops = broken_loops(places_of(break_), str(getattr(break_, "reason", break_)))
        if loops:
            try:
                told(loops)
            except KeptLayerError as error:
                frame = inspect.currentframe()
                raise BackendCompilerFailed(compiler_fn, error, frame) from None
            return
