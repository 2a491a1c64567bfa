"""What model code may ask while dynamo traces it: for whom, and are data-dependent shapes captured.

Dynamo evaluates both questions once per trace and puts the answer into the graph as a constant; its
guard on the backend keeps a trace for moe_graph apart from one for another backend. Outside a
trace both answers are False.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch._dynamo
from torch._dynamo.eval_frame import innermost_backend

MARK = "moe_graph_frontends"
"""Attribute that is true on a backend for which frontends may change what is traced."""


@dataclass
class Trace:
    """One attempt of dynamo to trace a frame for a backend that has :data:`MARK`.

    Attributes:
        captures: data-dependent shapes and scalars become part of the graph.
        retries: dynamo will trace the frame again without them if this attempt fails.
        mattered: something was captured, or a loop was lifted because it would be.
        found_layers: the passes have found MoE layers, rewritten or kept.
        assumes_length: a bincount was taken to be no longer than its ``minlength``.
    """

    captures: bool
    retries: bool = False
    mattered: bool = False
    found_layers: bool = False
    assumes_length: bool = False


_current = threading.local()


def current_trace() -> Trace | None:
    """Return the attempt under way in this thread, None when there is none."""
    return getattr(_current, "trace", None)


@contextlib.contextmanager
def tracing(trace: Trace | None) -> Iterator[None]:
    """Within this context the attempt under way is `trace`."""
    before = current_trace()
    _current.trace = trace
    try:
        yield
    finally:
        _current.trace = before


def unwrapped(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend itself, however dynamo and ``torch.compile`` have wrapped it."""
    backend = innermost_backend(backend)
    return innermost_backend(getattr(backend, "compiler_fn", backend))


def has_frontends(backend: Callable[..., Any]) -> bool:
    """Whether frontends may change what dynamo traces for `backend`."""
    return bool(getattr(unwrapped(backend), MARK, False))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def tracing_for_moe_graph() -> bool:
    """Whether dynamo is tracing the caller for moe_graph."""
    return current_trace() is not None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def capturing_for_moe_graph() -> bool:
    """Whether dynamo is tracing the caller for moe_graph and captures data-dependent shapes."""
    trace = current_trace()
    if trace is None or not trace.captures:
        return False
    trace.mattered = True
    return True
