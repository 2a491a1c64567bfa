"""One name and one argument list for every node, whatever its spelling.

Before::

    sort = torch.sort(ids)          ids.sort()         torch.ops.aten.sort.default(ids, -1)
    y = perm // 2                   perm.floor_divide(2)    perm.div(2, rounding_mode="floor")
    z = x[perm]                     torch.ops.aten.index.Tensor(x, [perm])
    out.add_(bias)                  out += bias

After::

    Call("sort", input=ids, dim=-1, descending=False, stable=False)
    Call("div", input=perm, other=2, rounding_mode="floor")
    Call("index", input=x, indices=[perm])
    Call("add", input=out, other=bias, alpha=1, writes=out)

A node that no table knows keeps its own name, with ``known=False``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.spellings import (
    ARGUMENT_NAMES,
    CANONICAL,
    FUNCTIONS,
    IN_PLACE_OPERATORS,
    KNOWN,
    METHOD_EXTRAS,
    OPERATORS,
    REQUIRED,
    SIGNATURES,
)


@dataclass(frozen=True, eq=False)
class Call:
    """A node in canonical form.

    Attributes:
        op: canonical name.
        node: the node itself.
        args: arguments by name; positional ones of an op without a signature are ``"0"``, ``"1"``.
        writes: the tensor that the call writes in place, None for a pure call.
        known: whether the name comes from a table; an unknown call may alias or write anything.
    """

    op: str
    node: Node
    args: Mapping[str, Any]
    writes: Node | None = None
    known: bool = True

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        """Return the argument called `name`, None when the call has none."""
        return self.args.get(name)

    def literal(self, name: str) -> Any:
        """Return the argument called `name` with symbolic ints in place of their nodes."""
        return meta.example(self.args.get(name))

    def tensors(self) -> Iterator[Node]:
        """Yield the tensor nodes among the arguments, in order."""
        for node in self.node.all_input_nodes:
            if meta.is_tensor(node):
                yield node


def is_complete(call: Call) -> bool:
    """Tell whether a call has every argument that rules may read by name."""
    signature = SIGNATURES.get(call.op, {})
    return all(name in call.args for name in signature)


def canonical(node: Node) -> Call:
    """Return `node` in canonical form."""
    if node.op == "call_method":
        return _named(node, str(node.target))
    if node.op != "call_function":
        return Call(node.op, node, {}, known=node.op in ("placeholder", "get_attr", "output"))
    target: Any = node.target
    if target is operator.getitem:
        return _subscript(node)
    if target is operator.setitem:
        return _subscript_write(node)
    if target in OPERATORS:
        op, extra = OPERATORS[target]
        return Call(op, node, _bind(op, node, extra))
    if target in IN_PLACE_OPERATORS:
        op, extra = IN_PLACE_OPERATORS[target]
        return Call(op, node, _bind(op, node, extra), writes=_first(node))
    if isinstance(target, torch._ops.OpOverload):
        return _overload(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overload = _overload_of(target)
        return (
            Call(str(target), node, {}, known=False)
            if overload is None
            else _overload(node, overload)
        )
    if target is getattr and len(node.args) > 1 and node.args[1] in ("T", "mT"):
        return Call("permute", node, {"input": node.args[0]})
    name = FUNCTIONS.get(target) if getattr(target, "__hash__", None) else None
    if name is None:
        name = getattr(target, "__name__", str(target))
        return Call(name, node, _bind(name, node, {}), known=False)
    return _named(node, name)


def _named(node: Node, name: str) -> Call:
    """Read a method or a function of torch; a trailing underscore writes the first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    base = name[:-1] if in_place else name
    op, extra = METHOD_EXTRAS.get(base, (CANONICAL.get(base, base), {}))
    if op == "cast" and _moves_device(node):
        op = "to_device"
    if op == "reshape" and any(isinstance(arg, torch.dtype) for arg in node.args):
        op = "view_dtype"
    if op == "max" and not any(isinstance(arg, int) for arg in _values(node)[1:]):
        op = "maximum" if len(node.args) > 1 else "amax"
    args = _bind(op, node, extra)
    writes = _first(node) if in_place or args.get("inplace") is True else None
    if isinstance(node.kwargs.get("out"), Node):
        writes = node.kwargs["out"]  # type: ignore[assignment]
    return Call(op, node, args, writes=writes, known=op in KNOWN)


def _overload(node: Node, target: torch._ops.OpOverload) -> Call:
    """Read an ATen (or any registered) overload by its schema."""
    schema = target._schema
    namespace, _, base = schema.name.partition("::")
    known = namespace in ("aten", "prims") or base in CANONICAL
    base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    op, extra = METHOD_EXTRAS.get(base, (CANONICAL.get(base, base), {}))
    if op == "max" and target._overloadname != "dim":
        op = "maximum" if len(node.args) > 1 else "amax"
    if op == "slice":
        return _basic_subscript(node, node.args[0], _slice_index(node))
    names = (argument.name for argument in schema.arguments)
    given = _arguments(node, names)
    writes = None
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write and isinstance(given.get(argument.name), Node):
            writes = given[argument.name]
    if schema.is_mutable and writes is None:
        known = False
    return Call(op, node, _complete(op, given, extra), writes=writes, known=known)


def _overload_of(packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload | None:
    """Return the overload for tensors of a packet, None where its names do not tell."""
    name = next((name for name in ("default", "Tensor") if name in packet.overloads()), None)
    return None if name is None else getattr(packet, name)


def _bind(op: str, node: Node, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a method or function after the signature of `op`."""
    names = list(SIGNATURES.get(op, {"input": REQUIRED}))
    given: dict[str, Any] = {}
    if op == "einsum":
        given = {"equation": node.args[0], "operands": list(_flat(node.args[1:]))}
    elif op == "arange" and len(node.args) == 1:
        given = {"start": 0, "end": node.args[0]}
    else:
        for position, value in enumerate(node.args):
            given[names[position] if position < len(names) else str(position)] = value
    given.update(node.kwargs)
    return _complete(op, given, extra)


def _complete(op: str, given: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arguments to the names of the signature of `op` and fill in its defaults."""
    signature = SIGNATURES.get(op, {"input": REQUIRED})
    args = {name: default for name, default in signature.items() if default is not REQUIRED}
    for name, value in {**given, **extra}.items():
        other = ARGUMENT_NAMES.get(name, name)
        args[other if other in signature and name not in signature else name] = value
    if op == "arange" and "start" not in args:
        args["start"] = 0
    return args


def _subscript(node: Node) -> Call:
    """Read ``a[i]``: an output of a tuple, a gather by index tensors, or a basic slice."""
    source, key = _values(node)
    if not meta.is_tensor(source):
        return Call("result", node, {"input": source, "index": key})
    indices = _index_tensors(key)
    if indices is not None:
        return Call("index", node, {"input": source, "indices": indices})
    items = key if isinstance(key, tuple) else (key,)
    if any(isinstance(item, Node | list) and meta.is_tensor(item) for item in items):
        return Call("mixed_index", node, {"input": source, "index": key})
    return _basic_subscript(node, source, tuple(items))


def _basic_subscript(node: Node, source: Any, items: tuple[Any, ...]) -> Call:
    """Read a subscript without tensors; one that takes everything is a reshape."""
    everything = (Ellipsis, slice(None), slice(0, None), slice(None, None, 1))
    if all(item is None or item in everything for item in items):
        return Call("reshape", node, {"input": source})
    return Call("slice", node, {"input": source, "index": items})


def _subscript_write(node: Node) -> Call:
    """Read ``a[i] = v``."""
    source, key, values = _values(node)
    written = source if isinstance(source, Node) else None
    indices = _index_tensors(key)
    if indices is None:
        return Call("slice_write", node, {"input": source, "index": key}, writes=written)
    args = {"input": source, "indices": indices, "values": values, "accumulate": False}
    return Call("index_put", node, args, writes=written)


def _index_tensors(key: Any) -> list[Any] | None:
    """Return `key` as ATen's list of index tensors, None when it is not one."""
    items = list(key) if isinstance(key, tuple | list) else [key]
    if not items or not meta.is_tensor(items[0]):
        return None
    while items and items[-1] in (Ellipsis, slice(None)):
        items.pop()
    return items if all(meta.is_tensor(item) for item in items) else None


def _slice_index(node: Node) -> tuple[Any, ...]:
    """Return the arguments of ``aten.slice`` or a slice of one dimension as a subscript."""
    names = ("self", "dim", "start", "end", "step")
    given = _arguments(node, names)
    dim = given.get("dim", 0)
    rank = len(meta.shape(given["self"]))
    end = given.get("end")
    if isinstance(end, int) and end >= 2**62:
        end = None
    wanted = slice(given.get("start"), end, given.get("step", 1))
    return (slice(None),) * (dim % rank) + (wanted,)


def _moves_device(node: Node) -> bool:
    """Tell whether a cast also moves the tensor to another device."""
    source, result = meta.example(_first(node)), meta.example(node)
    both = isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)
    return both and source.device != result.device


def _first(node: Node) -> Node | None:
    """Return the first argument if it is a node."""
    first = next(iter(_values(node)), None)
    return first if isinstance(first, Node) else None


def _values(node: Node) -> list[Any]:
    args: Any = node.args  # the declared type is recursive, which mypy takes minutes to unify
    kwargs: Any = node.kwargs
    return [*args, *kwargs.values()]


def _arguments(node: Node, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _flat(values: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value
