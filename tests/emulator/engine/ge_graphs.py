"""Builds GE graphs with TorchAir's own graph API and runs them in the engine, without FX."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.ge_ir_pb2 import DataType
from torchair.ge._ge_graph import GeGraph, torch_type_to_ge_type

from moe_graph.emulator.engine import session

SESSION = 10_000  # a number that no session of TorchAir has
_graph_ids = itertools.count()
UNKNOWN_RANK = [-2]


def serialise(
    build: Callable[..., Any], inputs: Sequence[torch.Tensor], *, dynamic: bool = False
) -> bytes:
    """Return the ModelDef of ``build(*data)``; `build` returns a ge.Tensor or several."""
    with GeGraph() as graph:
        data = [
            ge.Data(
                index=index,
                dtype=torch_type_to_ge_type(each.dtype),
                shape=[-1] * each.dim() if dynamic else list(each.shape),
                placement="NPU",
            )
            for index, each in enumerate(inputs)
        ]
        results = build(*data)
        ge.NetOutput(list(results) if isinstance(results, list | tuple) else [results])
    net_output = next(op for op in graph.op if op.type == "NetOutput")
    for desc in net_output.input_desc:  # the graph was not made from FX: nothing is declared
        desc.shape.dim[:] = UNKNOWN_RANK
        desc.dtype = DataType.DT_UNDEFINED
    return graph.SerializeToString()


def add(model: bytes, **options: str) -> int:
    """Add a graph and return its number."""
    graph_id = next(_graph_ids)
    session.add_graph(SESSION, graph_id, model, options)
    return graph_id


def run_ge(build: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Build a graph, run it on CPU tensors and return its outputs."""
    graph_id = add(serialise(build, inputs))
    try:
        return session.run(SESSION, graph_id, inputs)
    finally:
        session.remove_graph(SESSION, graph_id)
