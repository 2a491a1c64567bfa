"""Compiles a MoE layer or a whole model for the emulated NPU and compares it with eager PyTorch.

The oracle is the unmodified model on the CPU, with the implementation of its experts that
transformers runs when asked for ``eager``. Dropout and other noise is off (``eval``), gradients are
taken all the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import moe_graph
from moe_graph.backend import Compilation, MoeGraphBackend
from moe_graph.converters.coverage import LoweringError
from tests.zoo.building import Arguments, build, floats
from tests.zoo.finding import Family

IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
PARTS = ("layer", "model")
STEPS = ("inference", "token counts", "training")
TOKENS = 16
TOKEN_COUNTS = (TOKENS, *range(2, TOKENS), *range(TOKENS + 1, 42))
"""Forty token counts in the order in which they come."""


@dataclass
class Row:
    """What came of one family.

    Attributes:
        family: its name.
        part: ``"layer"`` or ``"model"``.
        experts: implementation of the experts, empty where a family has but one.
        graphs: dynamo graphs of one forward.
        layers: MoE layers of the part.
        rewritten: how many of them became fused ops.
        form, router: of the rewritten layers.
        error: largest difference of an output over its largest value, inference.
        gradient_error: the same for gradients, the worst of all parameters.
        compiles: graphs that forty token counts took; None if not asked.
        ge_nodes: nodes in the graph engine, of static inference if asked, else of training.
        seconds: that all of it took.
        kept: check that a layer failed -> what was found.
        failures: steps that failed, with the ops that have no lowering, or the error.
    """

    family: str
    part: str
    experts: str = ""
    graphs: int = 0
    layers: int = 0
    rewritten: int = 0
    form: str = ""
    router: str = ""
    error: float | None = None
    gradient_error: float | None = None
    compiles: int | None = None
    ge_nodes: int = 0
    seconds: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def gaps(self) -> list[str]:
        """All that is not as it is to be, a line each."""
        breaks = [f"breaks: {self.graphs} graphs"] if self.graphs > 1 else []
        return [
            *(f"kept: {check}: {got}" for check, got in self.kept.items()),
            *breaks,
            *self.failures,
        ]


class CountingBackend(MoeGraphBackend):
    """A backend of moe_graph that also counts the nodes of its GE graphs.

    Args:
        verify: run every rewrite against what it replaces.
    """

    def __init__(self, verify: bool) -> None:
        super().__init__(moe_graph.Config(on_miss="ignore", verify=verify))
        self.ge_nodes = 0

    def begin(self, gm: torch.fx.GraphModule) -> Compilation:
        """Open the compilation of one graph."""
        compilation = super().begin(gm)
        finish = compilation.after_conversion

        def count(ge_graph: Any) -> None:
            self.ge_nodes += len(ge_graph.op)
            finish(ge_graph)

        compilation.after_conversion = count  # type: ignore[method-assign]
        return compilation


def usual_steps(part: str, experts: str) -> tuple[str, ...]:
    """Return the steps that fit into the time of a whole zoo.

    A training graph tells of the forward too, and ``eager`` experts give the graph of
    ``grouped_mm``: whole models with these are asked in training alone.
    """
    main = experts in ("", "grouped_mm")
    if part == "layer":
        return STEPS if main else ("inference", "training")
    return ("inference", "training") if main else ("training",)


def measure(
    family: Family, part: str, experts: str = "", steps: Sequence[str] | None = None
) -> Row:
    """Return the row of one part of a family; what fails is in it, nothing is raised.

    Args:
        family: what to build.
        part: ``"layer"`` or ``"model"``.
        experts: implementation, empty for the only one.
        steps: some of :data:`STEPS`; None takes the usual ones.
    """
    row = Row(family.name, part, experts)
    begin = time.perf_counter()
    try:
        _Measurement(row, family).run(usual_steps(part, experts) if steps is None else steps)
    except Exception as error:
        row.failures.append(f"build: {_said(error)}")
    row.seconds = time.perf_counter() - begin
    return row


class _Measurement:
    def __init__(self, row: Row, family: Family) -> None:
        self._row = row
        eager = build(family, "eager" if row.experts else None)
        device = build(family, row.experts or None)
        self._oracle: nn.Module = eager.model
        self._module: nn.Module = device.model
        self._arguments: Callable[[int], Arguments] = eager.model_arguments
        row.layers = len(eager.layers)
        if row.part == "layer":
            self._oracle, self._module = eager.layer, device.layer
            self._arguments = eager.layer_arguments
            row.layers = 1
        if not family.switchable:
            # The experts of transformers' registry need nothing, loops of other layers do.
            self._module = moe_graph.prepare(self._module)
        self._module.npu()

    def run(self, steps: Sequence[str]) -> None:
        """Fill in the row."""
        run = {"inference": self._infer, "token counts": self._count, "training": self._train}
        for step in steps:
            torch._dynamo.reset()
            try:
                run[step]()
            except Exception as error:
                self._row.failures.append(f"{step}: {_said(error)}")

    def _infer(self) -> None:
        backend = CountingBackend(verify=self._row.part == "layer")
        compiled = torch.compile(self._module, backend=backend, dynamic=False)
        args = self._arguments(TOKENS)
        with torch.no_grad():
            want = floats(_call(self._oracle, args))
            try:
                got = floats(_call(compiled, _on_npu(args)))
            finally:
                self._note(backend)
        self._see(got, want)

    def _count(self) -> None:
        backend = CountingBackend(verify=self._row.part == "layer")
        compiled = torch.compile(self._module, backend=backend)
        for tokens in TOKEN_COUNTS:
            args = self._arguments(tokens)
            with torch.no_grad():
                want, got = _call(self._oracle, args), _call(compiled, _on_npu(args))
            self._see(floats(got), floats(want))
        self._row.compiles = backend.report.graphs

    def _train(self) -> None:
        backend = CountingBackend(verify=self._row.part == "layer")
        compiled = torch.compile(self._module, backend=backend, dynamic=False)
        args = self._arguments(TOKENS)
        outputs, want = _gradients(self._oracle, self._oracle, args)
        try:
            got_outputs, got = _gradients(compiled, self._module, _on_npu(args))
        finally:
            if self._row.error is None:
                self._note(backend)
        self._see(got_outputs, outputs)
        if got.keys() != want.keys():
            raise AssertionError(f"gradients of other tensors: {sorted(got.keys() ^ want.keys())}")
        # A gradient that is zero but for rounding is measured against the largest of all.
        floor = 1e-3 * max((gradient.abs().max().item() for gradient in want.values()), default=0)
        gradients = [want[name] for name in got]
        self._row.gradient_error = _worst(list(got.values()), gradients, max(floor, 1e-6))

    def _see(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        self._row.error = max(self._row.error or 0.0, _worst(got, want))

    def _note(self, backend: CountingBackend) -> None:
        row, report = self._row, backend.report
        row.graphs, row.ge_nodes = report.graphs, backend.ge_nodes
        row.rewritten = len(report.rewritten)
        row.form = _names([layer.form for layer in report.rewritten])
        row.router = _names([layer.router for layer in report.rewritten])
        row.kept = {
            reason.check: reason.got for layer in report.kept for reason in layer.reasons[:1]
        }


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    args, kwargs = arguments
    return function(*args, **kwargs)


def _on_npu(arguments: Arguments) -> Arguments:
    return tree_map_only(Tensor, lambda tensor: tensor.npu(), arguments)


def _gradients(
    function: Callable[..., Any], module: nn.Module, arguments: Arguments
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of parameters and floating-point arguments by name, on the CPU."""
    module.zero_grad(set_to_none=True)
    inputs: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        if tensor.is_floating_point():
            inputs.append(tensor.requires_grad_())
        return tensor

    outputs = floats(_call(function, tree_map_only(Tensor, leaf, arguments)))
    torch.manual_seed(1)
    total = sum((out.float() * torch.randn(out.shape).to(out.device)).sum() for out in outputs[:1])
    total.backward()  # type: ignore[union-attr]
    named = dict(module.named_parameters())
    named |= {f"input {number}": tensor for number, tensor in enumerate(inputs)}
    gradients = {name: t.grad.cpu() for name, t in named.items() if t.grad is not None}
    return [out.detach() for out in outputs], gradients


def _worst(got: Sequence[Tensor], want: Sequence[Tensor], floor: float = 1e-6) -> float:
    """Largest difference over the largest value of each tensor, at least `floor`; the worst."""
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} tensors instead of {len(want)}")
    errors = [0.0]
    for mine, other in zip(got, want, strict=True):
        mine, other = mine.cpu().float(), other.float()
        if mine.shape != other.shape:
            raise AssertionError(f"shape {list(mine.shape)} instead of {list(other.shape)}")
        alike = mine == other  # infinities of masks among them
        if alike.all():
            continue
        scale = other.masked_fill(~other.isfinite(), 0.0).abs().max().clamp(min=floor)
        difference = torch.where(alike, 0.0, (mine - other).abs())
        errors.append((difference.max() / scale).item())
    if any(error != error for error in errors):
        raise AssertionError("not a number in a result")
    return max(errors)


def _names(names: list[str | None]) -> str:
    return " ".join(name or "?" for name in Counter(names))


def _said(error: BaseException) -> str:
    """Name the ops without a lowering, else the first line of the error underneath."""
    seen = {error}
    while True:
        if isinstance(error, LoweringError):
            return ", ".join(missing.op for missing in error.missing)
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None or inner in seen:
            break
        seen.add(inner)
        error = inner
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
