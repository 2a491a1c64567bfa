"""The backend for ``torch.compile``: the one path of a graph, readable top to bottom.

::

    dynamo graph ── passes ──> dynamo graph with moe_graph:: ops, nothing data-dependent left
                 ── AOT, decompositions ──> ATen graphs, forward and backward
                 ── converters ──> GE graphs ──> CANN, or the emulated engine

TorchAir runs the last three steps. What is added here: the passes before them, the converters and
decompositions that TorchAir lacks, and the report.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._dynamo.exc import RestartAnalysis

from moe_graph.config import Config
from moe_graph.converters import attention_tracing, register_converters
from moe_graph.converters.coverage import LoweringError, missing_lowerings
from moe_graph.converters.decompositions import decompositions
from moe_graph.dumps import Dumps
from moe_graph.float_inputs import make_constant
from moe_graph.frontends import capture
from moe_graph.frontends.breaks import BrokenLoop
from moe_graph.ops import use_product
from moe_graph.passes import rewrite_moe_layers
from moe_graph.provenance import GE_ATTRIBUTE, layer_in
from moe_graph.report import KeptLayerError, LayerReport, Report, first_reasons
from moe_graph.torchair_seam import Convert, compile_with_torchair, prepare_compiler_config

if TYPE_CHECKING:
    import torchair

logger = logging.getLogger("moe_graph")


class MoeGraphBackend:
    """A dynamo backend; see :func:`npu_backend`.

    Attributes:
        config: the settings it was made with.
        report: what it has compiled so far, see :class:`moe_graph.report.Report`.
    """

    moe_graph_frontends = True  # asked by moe_graph.frontends.tracing

    def __init__(
        self, config: Config | None = None, compiler_config: torchair.CompilerConfig | None = None
    ) -> None:
        self.config = config or Config()
        self.report = Report()
        self._compiler_config = compiler_config
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        attention_tracing.install()
        capture.install()

    def __repr__(self) -> str:
        """Dynamo names the backend so in its errors."""
        return f"moe_graph.npu_backend({self.config})"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compile one dynamo graph. Called by ``torch.compile``."""
        return self.compile(gm, example_inputs, options)

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        options: dict[str, Any],
        convert: Convert | None = None,
    ) -> Callable[..., Any]:
        """Run the whole path; `convert` takes the place of TorchAir's conversion of ATen graphs."""
        make_constant(gm)
        compilation = self.begin(gm)
        register_converters()
        try:
            capture.refuse_leftovers(gm)
            with compilation.converting():
                return compile_with_torchair(
                    gm,
                    example_inputs,
                    compiler_config=compilation.compiler_config,
                    decompositions=decompositions(),
                    observer=compilation,
                    options=options,
                    convert=convert,
                )
        except (RestartAnalysis, capture.CapturedInVainError) as error:
            # Dynamo traces the frame again and comes back with another graph. Where that one has
            # but fragments of a kept layer, the reason found in this one says more.
            with self._lock:
                compilation.withdraw(kept=isinstance(error, RestartAnalysis))
            raise

    def begin(self, gm: torch.fx.GraphModule) -> Compilation:
        """Run the passes on `gm`, in place, and open its part of the report.

        Raises:
            KeptLayerError: a layer was kept and ``Config(on_miss="error")`` is set.
        """
        with self._lock:
            number = next(self._numbers)
            self.report.graphs += 1
        dumps = Dumps(self.config.dump_path, number)
        dumps.write_fx("before", gm)
        capture.note_captured(gm)
        layers = rewrite_moe_layers(gm, self.config)
        capture.note_layers(bool(layers))
        dumps.write_fx("after", gm)
        for layer in layers:
            layer.graph = number
        with self._lock:
            self.report.layers.extend(layers)
        dumps.write_report(self.report)
        self._speak_of_kept(layers)
        compiler_config = prepare_compiler_config(self._compiler_config)
        return Compilation(self.config, self.report, layers, dumps, compiler_config)

    def loop_broke(self, loops: list[BrokenLoop]) -> None:
        """Report loops over experts in which dynamo broke, unless the layer is in the report.

        Raises:
            KeptLayerError: ``Config(on_miss="error")`` is set.
        """
        with self._lock:
            known = {layer.source for layer in self.report.layers}
            new = [loop.report for loop in loops if not loop.around & known]
            self.report.layers.extend(new)
        self._speak_of_kept(new)

    def _speak_of_kept(self, layers: list[LayerReport]) -> None:
        kept = [layer for layer in layers if layer.status == "kept"]
        if not kept or self.config.on_miss == "ignore":
            return
        if self.config.on_miss == "error":
            raise KeptLayerError(kept[0])
        for line in first_reasons(kept):
            logger.warning("MoE layer kept as it is: %s", line)


class Compilation:
    """One dynamo graph on its way through TorchAir; fills in the report as the graph goes."""

    def __init__(
        self,
        config: Config,
        report: Report,
        layers: list[LayerReport],
        dumps: Dumps,
        compiler_config: torchair.CompilerConfig,
    ) -> None:
        self.compiler_config = compiler_config
        self._config = config
        self._report = report
        self._layers = layers
        self._dumps = dumps

    def withdraw(self, kept: bool) -> None:
        """Take this graph out of the report: its rewritten layers, and the `kept` ones or not."""
        self._report.graphs -= 1
        withdrawn = [layer for layer in self._layers if kept or layer.status == "rewritten"]
        self._report.layers = [
            layer for layer in self._report.layers if not any(layer is other for other in withdrawn)
        ]

    def before_conversion(self, gm: torch.fx.GraphModule) -> None:
        """Keep the ATen graph for whoever reads the dumps."""
        self._dumps.write_aten(gm)

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Check ops for the configured product within this context."""
        return use_product(self._config.product)

    def conversion_failed(self, gm: torch.fx.GraphModule, error: Exception) -> Exception:
        """Return the error to raise: every op without a lowering, not only the first."""
        missing = missing_lowerings(gm)
        if not missing:
            return error
        return LoweringError(missing, cause=str(error).partition("\n")[0])

    def after_conversion(self, ge_graph: Any) -> None:
        """Count the GE nodes of each rewritten layer."""
        counts: dict[str, Counter[str]] = {}
        for op in ge_graph.op:
            layer = layer_in(op.attr[GE_ATTRIBUTE].s.decode()) if GE_ATTRIBUTE in op.attr else ""
            if layer:
                counts.setdefault(layer, Counter())[op.type] += 1
        for report in self._layers:
            found = counts.get(report.path)
            if found:
                report.ge_nodes = dict(Counter(report.ge_nodes) + found)
        self._dumps.write_ge(ge_graph)
        self._dumps.write_report(self._report)


def npu_backend(
    config: Config | None = None, *, compiler_config: torchair.CompilerConfig | None = None
) -> MoeGraphBackend:
    """Return a backend for ``torch.compile`` that rewrites MoE layers and compiles for Ascend.

    Args:
        config: settings of moe_graph; None takes the defaults.
        compiler_config: settings of TorchAir; None takes TorchAir's defaults. It is copied.

    Returns:
        A callable for ``torch.compile(model, backend=...)``; its ``report`` grows with every graph.
    """
    return MoeGraphBackend(config, compiler_config)


moe_graph_backend = MoeGraphBackend()
"""What ``torch.compile(model, backend="moe_graph")`` uses."""
