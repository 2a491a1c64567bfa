"""New nodes that carry the same meta as traced ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves

from moe_graph.passes import meta
from moe_graph.provenance import LAYER_KEY

_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack")


class Results:
    """What calls yield on example values, each distinct call run once.

    Identical layers make identical calls, so a model's second layer costs no fake kernel.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of nodes yields on their example values."""
        fake_args = map_arg(args, meta.example)
        fake_kwargs = map_arg(kwargs, meta.example)
        leaves, structure = tree_flatten((fake_args, fake_kwargs))
        key = (target, structure, tuple(map(_description, leaves)))
        if key not in self._known:
            self._known[key] = _infer(target, fake_args, fake_kwargs)
        return self._known[key]


def _description(leaf: Any) -> Any:
    """Return all that a fake kernel can tell of one argument, as a key."""
    if isinstance(leaf, torch.Tensor):
        sizes = tuple(_symbol(dim) for dim in (*leaf.shape, *leaf.stride()))
        return (sizes, leaf.dtype, leaf.device, leaf.layout, getattr(leaf, "fake_mode", None))
    # A slice has no hash.
    return (type(leaf), str(leaf) if isinstance(leaf, slice) else _symbol(leaf))


def _symbol(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


class Emitter:
    """Inserts the nodes of one layer and can take them out again.

    Args:
        graph: where to insert.
        layer: module path of the layer, left on every new node.
        results: example values that are known from other layers.
    """

    def __init__(self, graph: Graph, layer: str, results: Results) -> None:
        self._graph = graph
        self._layer = layer
        self._results = results
        self.nodes: list[Node] = []
        self._refreshed: dict[Node, Any] = {}

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        at: Node,
        name: str,
    ) -> Node:
        """Insert a call before the node `at`, whose origin it inherits.

        Raises:
            moe_graph.ops.OpError: the op refuses these arguments.
        """
        kwargs = dict(kwargs or {})
        key = "example_value" if "example_value" in at.meta else "val"
        value = self._results.of(target, args, kwargs)
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self._graph.inserting_before(at):
            node = self._graph.create_node(kind, target, args, kwargs, name=name)
        node.meta.update({k: at.meta[k] for k in _INHERITED if k in at.meta})
        node.meta[key] = value
        self.mark(node)
        self.nodes.append(node)
        return node

    def copy(self, node: Node, operand: Callable[[Node], Node], *, at: Node) -> Node:
        """Insert `node` once more before `at`, with other operands."""
        args: Any = map_arg(node.args, operand)  # the declared types are recursive
        kwargs: Any = map_arg(node.kwargs, operand)
        return self.call(node.target, args, kwargs, at=at, name=f"{node.name}_grouped")

    def item(self, source: Node, index: int, *, at: Node, name: str) -> Node:
        """Insert the choice of one result of `source`."""
        return self.call(operator.getitem, (source, index), at=at, name=name)

    def cast(self, node: Node, dtype: torch.dtype, *, at: Node) -> Node:
        """Insert a cast of `node`, or return `node` where it has that dtype already."""
        if meta.dtype(node) == dtype:
            return node
        cast = torch.ops.aten._to_copy.default
        name = f"{node.name}_{str(dtype).removeprefix('torch.')}"
        return self.call(cast, (node,), {"dtype": dtype}, at=at, name=name)

    def reshape(self, node: Node, dims: tuple[meta.Dim, ...], *, at: Node) -> Node:
        """Insert a reshape of `node`; -1 stands for the dimension that depends on the tokens."""
        reshape = torch.ops.aten.reshape.default
        return self.call(reshape, (node, list(dims)), at=at, name=f"{node.name}_reshaped")

    def with_widths(self, node: Node, widths: tuple[meta.Dim, ...], *, at: Node) -> Node:
        """Insert a reshape to ``[rows, *widths]``, or return `node` where it has that shape."""
        same = meta.same_shape(meta.shape(node)[1:], widths)
        return node if same else self.reshape(node, (-1, *widths), at=at)

    def mark(self, node: Node) -> None:
        """Leave the layer's path on `node`."""
        custom = node.meta.get("custom")
        node.meta["custom"] = {
            **(custom if isinstance(custom, dict) else {}),
            LAYER_KEY: self._layer,
        }

    def refresh(self, node: Node, operand: Callable[[Node], Node]) -> None:
        """Infer the example value of a node that stays anew, for other operands."""
        key = "example_value" if "example_value" in node.meta else "val"
        args: Any = map_arg(node.args, operand)  # the declared types are recursive
        kwargs: Any = map_arg(node.kwargs, operand)
        value = self._results.of(node.target, args, kwargs)
        self._refreshed[node] = (key, node.meta[key])
        node.meta[key] = value

    def was_refreshed(self, node: Node) -> bool:
        """Tell whether a node that stays has a new example value."""
        return node in self._refreshed

    def drop_unused(self, result: Node, candidates: list[Node]) -> None:
        """Take those of the inserted `candidates` out again that `result` does not depend on."""
        for node in reversed(candidates):
            if not node.users and node is not result and node in self.nodes:
                self.nodes.remove(node)
                self._graph.erase_node(node)

    def unmark(self, node: Node) -> None:
        """Take the layer's path from `node` again."""
        custom = {key: value for key, value in node.meta["custom"].items() if key != LAYER_KEY}
        if custom:
            node.meta["custom"] = custom
        else:
            del node.meta["custom"]

    def undo(self) -> None:
        """Take out every node that was inserted."""
        for node in reversed(self.nodes):
            self._graph.erase_node(node)
        self.nodes.clear()
        for node, (key, value) in self._refreshed.items():
            node.meta[key] = value
        self._refreshed.clear()


def _infer(target: Any, fake_args: Any, fake_kwargs: Any) -> Any:
    if isinstance(target, str):
        fake_self, *fake_args = fake_args
        target = getattr(fake_self, target)
    mode = _mode_of((fake_args, fake_kwargs))
    with torch.no_grad():
        if mode is None:
            return target(*fake_args, **fake_kwargs)
        with mode:
            return target(*fake_args, **fake_kwargs)


def _mode_of(values: Any) -> FakeTensorMode | None:
    """Return the fake mode of the tensors themselves.

    While a backend runs, the mode that dynamo announces is no longer the one it traced with.
    """
    fakes = (leaf for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor))
    first = next(fakes, None)
    return first.fake_mode if first is not None else None
