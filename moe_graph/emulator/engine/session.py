"""What the emulated ``ge::Session`` calls: add, describe, run and remove graphs.

Every exception raised here becomes the message of the RuntimeError that the user sees.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_graph.emulator.engine import dtypes, ir, model, options, plan, registry
from moe_graph.emulator.engine.errors import GraphError
from moe_graph.emulator.engine.executor import Executor
from moe_graph.emulator.engine.ir import IrDefinition


@dataclass(frozen=True)
class Summary:
    """What GE tells about a compiled graph.

    Attributes:
        is_static: no input has an unknown dim.
        output_shapes: declared shapes, -1 for an unknown dim.
        output_dtypes: declared dtypes as ``ge::DataType`` numbers.
    """

    is_static: bool
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[int]


@dataclass(frozen=True)
class _Loaded:
    graph: model.Graph
    executor: Executor


_GRAPHS: dict[tuple[int, int], _Loaded] = {}
_LOCK = threading.Lock()


def add_graph(
    session_id: int, graph_id: int, model_def: bytes, graph_options: Mapping[str, str]
) -> None:
    """Parse, check and plan a graph.

    Args:
        session_id: number of the ``ge::Session``.
        graph_id: number of the graph in its session; an old graph of this number is replaced.
        model_def: serialised ``ge.proto.ModelDef``.
        graph_options: the options of ``ge::Session::AddGraph``.

    Raises:
        GraphError: the graph cannot be executed; see :func:`moe_graph.emulator.engine.plan.build`.
    """
    options.check(graph_options)
    graph = model.parse(model_def)
    loaded = _Loaded(graph, Executor(plan.build(graph)))
    with _LOCK:
        _GRAPHS[session_id, graph_id] = loaded


def summary(session_id: int, graph_id: int) -> Summary:
    """Return what is known about a graph before it runs."""
    graph = _loaded(session_id, graph_id).graph
    outputs = graph.net_output.input_descs
    return Summary(
        is_static=all(dim >= 0 for node in graph.inputs for dim in node.output_descs[0].shape),
        output_shapes=[desc.shape for desc in outputs],
        output_dtypes=[dtypes.to_ge(desc.dtype) for desc in outputs if desc.dtype is not None],
    )


def run(
    session_id: int,
    graph_id: int,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Execute a graph on CPU tensors; see :meth:`Executor.run`."""
    return _loaded(session_id, graph_id).executor.run(inputs, outputs)


def remove_graph(session_id: int, graph_id: int) -> None:
    """Forget a graph. Forgetting an unknown one does nothing, as in GE."""
    with _LOCK:
        _GRAPHS.pop((session_id, graph_id), None)


def ir_definition(op_type: str) -> IrDefinition | None:
    """Return the prototype of an op that the engine can execute, None for any other."""
    return ir.definition(op_type) if registry.find(op_type) is not None else None


def statistics(session_id: int, graph_id: int) -> dict[str, int]:
    """Return GE op type -> number of nodes of a graph."""
    return dict(Counter(node.type for node in _loaded(session_id, graph_id).graph.nodes))


def node_counts() -> dict[tuple[int, int], dict[str, dict[str, int]]]:
    """Return, per graph, FX node name -> GE op type -> number of nodes it became.

    Keys are (session id, graph id). Nodes that TorchAir made on its own are under ``""``.
    """
    with _LOCK:
        loaded = dict(_GRAPHS)
    counts: dict[tuple[int, int], dict[str, dict[str, int]]] = {}
    for key, each in loaded.items():
        of_graph = counts.setdefault(key, {})
        for node in each.graph.nodes:
            types = of_graph.setdefault(node.fx.partition(" ")[0], {})
            types[node.type] = types.get(node.type, 0) + 1
    return counts


def _loaded(session_id: int, graph_id: int) -> _Loaded:
    with _LOCK:
        found = _GRAPHS.get((session_id, graph_id))
    if found is None:
        raise GraphError(f"graph {graph_id} of session {session_id}", want="a graph that was added")
    return found
