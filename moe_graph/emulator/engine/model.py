"""Reads the serialised ``ModelDef`` that TorchAir hands to GE into plain Python values.

The conventions of the format that only this file knows:

* an edge is the string ``"<node>:<output>"``; ``"<node>:-1"`` is a control edge, mixed into the
  same list, and has no descriptor; ``""`` is an optional input that is not fed;
* a dynamic input ``x`` is flattened to ``x0, x1, ...``;
* the dtype of a descriptor is reliable for Data, Const and NetOutput only: TorchAir leaves DT_FLOAT
  wherever it did not set one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from moe_graph.emulator.engine import dtypes
from moe_graph.emulator.engine.errors import GraphError

#: Node types that stand for a tensor given to the graph.
INPUT_TYPES = frozenset({"Data", "RefData"})
#: TorchAir writes here, when asked to, which module and line a node came from.
_ORIGIN = "nn_module_stack"


@dataclass(frozen=True)
class Port:
    """One output of one node."""

    node: str
    index: int


@dataclass(frozen=True)
class Desc:
    """Declared shape and dtype of a port; a negative dim is unknown."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    fx: str = ""


@dataclass
class Node:
    """One GE node.

    Attributes:
        name: unique in its graph.
        type: GE op type.
        inputs: data edges in order, None for an optional input that is not fed.
        input_descs: one per entry of `inputs`.
        controls: nodes that must run before this one, though no value flows.
        attrs: attribute name -> int, float, bool, str, list of these, or a tensor; without notes
            for GE's compiler, whose names begin with "_", and the origin.
        output_descs: one per output.
        fx: ``"<FX node> (<target>) in <module and source line>"`` it came from, empty when TorchAir
            recorded none.
    """

    name: str
    type: str
    inputs: tuple[Port | None, ...]
    input_descs: tuple[Desc, ...]
    controls: tuple[str, ...]
    attrs: dict[str, Any]
    output_descs: tuple[Desc, ...]
    fx: str = ""


@dataclass
class Graph:
    """A parsed graph, nodes in the order in which TorchAir wrote them."""

    name: str
    nodes: list[Node]
    by_name: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}

    @property
    def inputs(self) -> list[Node]:
        """The graph's inputs, in the order in which a run passes them."""
        found = [node for node in self.nodes if node.type in INPUT_TYPES]
        return sorted(found, key=lambda node: node.attrs.get("index", 0))

    @property
    def net_output(self) -> Node:
        """The node whose inputs are the graph's outputs."""
        for node in self.nodes:
            if node.type == "NetOutput":
                return node
        raise GraphError(f"graph {self.name} has no NetOutput")


def parse(model: bytes) -> Graph:
    """Parse a serialised ``ModelDef``.

    Raises:
        GraphError: the bytes are no ModelDef with one graph, or an edge leads nowhere.
    """
    from google.protobuf.message import DecodeError
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    message = ModelDef()
    try:
        message.ParseFromString(model)
    except DecodeError as error:
        raise GraphError(f"bytes that are no ModelDef ({error})") from error
    if len(message.graph) != 1:
        raise GraphError(f"a ModelDef with {len(message.graph)} graphs", want="exactly one graph")
    graph = Graph(message.graph[0].name, [_node(op) for op in message.graph[0].op])
    if len(graph.by_name) != len(graph.nodes):
        raise GraphError(f"graph {graph.name} names two nodes alike")
    _check_edges(graph)
    _spread_fx_names(graph)
    for op, node in zip(message.graph[0].op, graph.nodes, strict=True):
        if node.fx and _ORIGIN in op.attr:
            node.fx += f" in {op.attr[_ORIGIN].s.decode(errors='replace')}"
    return graph


def _node(op: Any) -> Node:
    inputs: list[Port | None] = []
    controls: list[str] = []
    for edge in op.input:
        name, _, index = edge.rpartition(":")
        if not edge:
            inputs.append(None)
        elif index == "-1":
            controls.append(name)
        else:
            inputs.append(Port(name, int(index)))
    output_descs = tuple(_desc(desc) for desc in op.output_desc)
    return Node(
        name=op.name,
        type=op.type,
        inputs=tuple(inputs),
        input_descs=tuple(_desc(desc) for desc in op.input_desc),
        controls=tuple(controls),
        attrs={
            name: _attr(value)
            for name, value in op.attr.items()
            if not name.startswith("_") and name != _ORIGIN
        },
        output_descs=output_descs,
        fx=next((desc.fx for desc in output_descs if desc.fx), ""),
    )


def _desc(desc: Any) -> Desc:
    tensor_name = desc.attr["_fx_tensor_name"].s.decode() if "_fx_tensor_name" in desc.attr else ""
    return Desc(
        desc.name, tuple(desc.shape.dim), dtypes.from_proto(desc.dtype), _readable_fx(tensor_name)
    )


def _readable_fx(tensor_name: str) -> str:
    """Turn ``"mm_1-aten.mm.default.OUTPUT.0"`` into ``"mm_1 (aten.mm.default)"``."""
    name, _, target = tensor_name.partition("-")
    return f"{name} ({target.rpartition('.OUTPUT')[0]})" if target else name


def _attr(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode(errors="replace")
    if kind == "list":
        return _list_attr(value.list)
    if kind == "t":
        return _tensor(value.t)
    if kind in ("list_list_int", "list_list_float"):
        return [list(row.list_i if kind == "list_list_int" else row.list_f) for row in _rows(value)]
    return None if kind is None else getattr(value, kind)


def _rows(value: Any) -> Any:
    ints = value.WhichOneof("value") == "list_list_int"
    return value.list_list_int.list_list_i if ints else value.list_list_float.list_list_f


def _list_attr(value: Any) -> list[Any]:
    for name in ("i", "f", "b", "dt"):
        items = getattr(value, name)
        if len(items):
            return list(items)
    return [item.decode(errors="replace") for item in value.s]


def _tensor(value: Any) -> torch.Tensor:
    dtype = dtypes.from_proto(value.desc.dtype)
    if dtype is None:
        raise GraphError(f"a constant of proto dtype {value.desc.dtype}", want="a dtype torch has")
    shape = tuple(value.desc.shape.dim)
    if not value.data:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(value.data), dtype=dtype)
    count = 1
    for dim in shape:
        count *= dim
    if flat.numel() < count:
        raise GraphError(f"a constant of {flat.numel()} elements", want=f"shape {shape}")
    return flat[:count].reshape(shape)


def _check_edges(graph: Graph) -> None:
    for node in graph.nodes:
        ports = [port for port in node.inputs if port is not None]
        for source in [port.node for port in ports] + list(node.controls):
            if source not in graph.by_name:
                raise GraphError(
                    f"an edge from {source!r}, which is no node of the graph",
                    op=node.type, node=node.name, fx=node.fx,
                )  # fmt: skip
        for port in ports:
            count = len(graph.by_name[port.node].output_descs)
            if port.index >= count:
                raise GraphError(
                    f"an edge from output {port.index} of {port.node}, which has {count}",
                    op=node.type, node=node.name, fx=node.fx,
                )  # fmt: skip


def _spread_fx_names(graph: Graph) -> None:
    """Give the helper nodes of a converter the FX name of the named node that they lead to.

    TorchAir names only what a converter returns. Nodes come in creation order, so a helper's
    consumers come after it.
    """
    for node in reversed(graph.nodes):
        if node.fx and node.type not in INPUT_TYPES:
            for port in node.inputs:
                if port is not None:
                    source = graph.by_name[port.node]
                    if not source.fx and source.type not in INPUT_TYPES:
                        source.fx = node.fx
