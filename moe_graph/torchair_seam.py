"""The one place that reaches into TorchAir beyond its public functions.

TorchAir 2.13 offers a backend (``torchair.get_npu_backend``) but no hook between the AOT graph and
the finished GE graph. Two things need one: writing a node's origin onto its GE nodes, and counting
the GE nodes of each layer. So the backend's own compile step is called with a compiler that wraps
TorchAir's. Everything private that is used is listed in ``_PRIVATE`` and checked by name, so that
another version of TorchAir fails with one clear line.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.fx
from torch._guards import detect_fake_mode

from moe_graph import emulator
from moe_graph.input_views import with_views_of_inputs
from moe_graph.provenance import annotate, annotate_custom_nodes

_PRIVATE = ("_compile_graph_with_aot", "_process_send_recv", "_process_kwargs_options")
_MERGED_VIEWS = {
    "aten.permute.default",
    "aten.reshape.default",
    "aten.t.default",
    "aten.transpose.int",
    "aten.view.default",
}
"""What ``experimental_config.enable_view_optimize`` merges."""
_GE_MODE = "max-autotune"  # the only mode that makes a GE graph
_DEFAULTS_LOCK = threading.Lock()

Convert = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]
"""Makes a callable of an ATen graph and its example inputs."""


class AotObserver(Protocol):
    """What the backend wants to know about each AOT graph."""

    def before_conversion(self, gm: torch.fx.GraphModule) -> None:
        """Called with the ATen graph; may raise to refuse it."""

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Entered for each conversion; that of a backward comes with the first backward pass."""

    def conversion_failed(self, gm: torch.fx.GraphModule, error: Exception) -> Exception:
        """Called when TorchAir could not convert `gm`; returns the error to raise."""

    def after_conversion(self, ge_graph: Any) -> None:
        """Called with the GE graph, in the mode that makes one."""


def prepare_compiler_config(compiler_config: Any | None) -> Any:
    """Return a copy of a ``torchair.CompilerConfig`` that also records where nodes come from.

    Raises:
        ValueError: it asks for a mode that the emulated device does not have.
    """
    import torchair

    config = copy.deepcopy(compiler_config) if compiler_config else torchair.CompilerConfig()
    mode = config.mode.value
    if mode == _GE_MODE:
        config.export.experimental.enable_record_nn_module_stack = True
    elif emulator.emulated:
        raise ValueError(
            f"compiler_config.mode: got {mode!r}, want {_GE_MODE!r}: other modes capture the "
            "kernels of a device, and this one is emulated"
        )
    return config


def compile_with_torchair(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler_config: Any,
    decompositions: dict[Any, Callable[..., Any]],
    observer: AotObserver,
    options: dict[str, Any],
    convert: Convert | None = None,
) -> Callable[..., Any]:
    """Compile a dynamo graph as ``torchair.get_npu_backend`` does, with `observer` told of it.

    Args:
        gm: dynamo's graph, forward only; AOT makes the backward.
        example_inputs: dynamo's example inputs.
        compiler_config: result of :func:`prepare_compiler_config`.
        decompositions: ATen op -> decomposition, added to TorchAir's own.
        observer: told of every ATen graph before and after its conversion.
        options: keyword arguments that ``torch.compile`` gave to the backend.
        convert: makes a callable of an ATen graph; None takes TorchAir's own conversion.

    Returns:
        The compiled callable.

    Raises:
        RuntimeError: this TorchAir lacks a function that is needed.
    """
    import torchair
    from torchair import npu_fx_compiler

    missing = [name for name in _PRIVATE if not hasattr(npu_fx_compiler, name)]
    if missing:
        raise RuntimeError(
            f"this TorchAir has no {', '.join(missing)} in torchair.npu_fx_compiler; "
            "moe_graph needs the TorchAir of torch_npu 2.13"
        )
    _guard_deterministic_level()
    with_views = bool(compiler_config.experimental_config.enable_view_optimize)
    # It compares the shapes of views, which makes a graph of its own for every token count that
    # happens to equal a number of heads, and adds nodes that compute shapes.
    with_views = with_views and not any(map(_has_symbolic_size, example_inputs))
    with _DEFAULTS_LOCK:  # building a backend patches TorchAir's metas once per process
        backend = torchair.get_npu_backend(
            compiler_config=compiler_config, custom_decompositions=decompositions
        )
    npu_fx_compiler._process_send_recv(gm, compiler_config)
    npu_fx_compiler._process_kwargs_options(compiler_config, options)
    convert = convert or torchair.get_compiler(compiler_config)

    def compile_aot_graph(aot_gm: torch.fx.GraphModule, aot_inputs: Sequence[Any]) -> Any:
        observer.before_conversion(aot_gm)
        annotate(aot_gm)
        compiler_config.experimental_config.enable_view_optimize = with_views and _only_dense(
            aot_gm
        )
        try:
            # Without a fake mode TorchAir would run real kernels to learn the shapes of a backward.
            fake_mode = detect_fake_mode(aot_inputs) or contextlib.nullcontext()
            with observer.converting(), fake_mode:
                compiled, call = with_views_of_inputs(aot_gm, aot_inputs, convert)
        except Exception as error:
            raise observer.conversion_failed(aot_gm, error) from error
        ge_graph = getattr(getattr(compiled, "runner", None), "graph", None)
        if hasattr(ge_graph, "op"):
            annotate_custom_nodes(aot_gm, ge_graph)
            observer.after_conversion(ge_graph)
        return call

    return npu_fx_compiler._compile_graph_with_aot(
        gm,
        compile_aot_graph,
        example_inputs,
        compiler_config,
        backend.keywords["decompositions"],
    )


def _only_dense(aot_gm: torch.fx.GraphModule) -> bool:
    """Tell whether TorchAir may merge the views of a graph.

    It follows them from a dense tensor, the layout that GE has. Where tracing saw another layout,
    ``x.transpose(1, 2).view(...)`` may be a view there and a copy here; TorchAir 2.13 then drops
    the transposition, and the results are wrong.
    """
    for node in aot_gm.graph.nodes:
        if str(node.target) not in _MERGED_VIEWS:
            continue
        source = node.all_input_nodes[0]
        if str(source.target) not in _MERGED_VIEWS and not source.meta["val"].is_contiguous():
            return False
    return True


def _has_symbolic_size(example_input: Any) -> bool:
    if isinstance(example_input, torch.Tensor):
        return not all(isinstance(size, int) for size in example_input.shape)
    return isinstance(example_input, torch.SymInt)


def _guard_deterministic_level() -> None:
    """Recompile when the deterministic level of the device changes, where torch_npu can tell."""
    try:
        from torch_npu.dynamo._deterministic_guard import install_npu_deterministic_level_guard
    except ImportError:
        return
    install_npu_deterministic_level_guard()
