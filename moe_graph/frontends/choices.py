"""Facts before a loop: which names hold the ids, the masks, the counts and the experts chosen.

::

    mask = one_hot(ids, E).permute(2, 1, 0)         Mask of ids, experts along axis 0
    counts = mask.sum(dim=(-1, -2))                 Counts of ids
    hit = torch.greater(counts, 0).nonzero()        Hits: the experts with tokens, as rows
    ends = bincount(ids.view(-1)).cumsum(0)         Counts of ids, running
    order = ids.view(-1).argsort()                  Order of ids
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import replace

from moe_graph.frontends.purity import Reading
from moe_graph.frontends.spelling import Call, index_parts, is_full_slice, spelled, whole_number
from moe_graph.frontends.values import (
    Counts,
    EmptyList,
    Hits,
    Key,
    Mask,
    Named,
    Order,
    Size,
    Static,
    Value,
)

_SAME_ELEMENTS = frozenset(
    {"view", "reshape", "flatten", "contiguous", "long", "int", "to", "cpu", "detach", "clone"}
    | {"squeeze", "unsqueeze", "type", "cuda", "ravel"}
)
_HOST = frozenset({"tolist", "cpu", "numpy", "long", "int", "to", "detach", "type"})
_BOOL = frozenset({"bool"})


class Choices:
    """The environment of a function up to a statement, and the value of an expression in it.

    Attributes:
        values: what is known of each name.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.values: dict[str, Value] = {}
        self._bindings: dict[str, int] = {}

    def copy(self) -> Choices:
        """Return an environment that can go its own way."""
        other = Choices(self.reading)
        other.values, other._bindings = dict(self.values), self._bindings
        return other

    def merge(self, branches: list[Choices]) -> None:
        """Keep what is known after each of several ways to get here."""
        names = {name for branch in branches for name in branch.values}
        for name in names:
            held = [branch.values.get(name) for branch in branches]
            first = held[0]
            if first is not None and all(value is first or value == first for value in held):
                self.values[name] = first
            else:
                self.forget(name)

    def forget(self, name: str) -> Named:
        """Bind a name to something that nothing is known of."""
        self._bindings[name] = self._bindings.get(name, 0) + 1
        value = Named((name, self._bindings[name]))
        self.values[name] = value
        return value

    def name(self, name: str) -> Value:
        """Return what is known of a name."""
        if name in self.values:
            return self.values[name]
        return Named((name, 0)) if name in self.reading.locals else Value()

    def bind(self, target: ast.expr, node: ast.expr) -> None:
        """Note ``target = node``."""
        if isinstance(target, ast.Name):
            value = self.value(node)
            if isinstance(value, Value) and type(value) is Value:
                self.forget(target.id)
            else:
                self.values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            one_by_one = isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(
                target.elts
            )
            if one_by_one and not _names(target) & _names(node):
                for part, value in zip(target.elts, node.elts, strict=True):  # type: ignore[attr-defined]
                    self.bind(part, value)
            else:
                self._unpack(target.elts, node)
        else:
            self.write(target)

    def write(self, target: ast.expr) -> None:
        """Note that a tensor is written in place: all that shares its name or choice is void."""
        while isinstance(target, ast.Subscript | ast.Attribute | ast.Call):
            target = target.func if isinstance(target, ast.Call) else target.value
        if isinstance(target, ast.Name):
            key = getattr(self.name(target.id), "key", None)
            for name, value in list(self.values.items()):
                if key is not None and getattr(value, "key", None) == key:
                    self.forget(name)
            self.forget(target.id)

    def effect(self, node: ast.expr) -> None:
        """Note a call for its effect: ``counts.scatter_(1, ids, 1)`` makes a mask."""
        call = spelled(node, self.reading)
        if call is None or not call.args or not call.name.endswith("_"):
            return
        target = call.args[0]
        value = self._scattered(call)
        self.write(target)
        if isinstance(target, ast.Name) and value is not None:
            self.values[target.id] = value

    def value(self, node: ast.expr) -> Value:
        """Return what is known of an expression."""
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.List) and not node.elts:
            return EmptyList()
        if isinstance(node, ast.Constant):
            return Static(node.value)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.BinOp):
            ordered = self.value(node.left)
            by_size = isinstance(node.op, ast.FloorDiv) and isinstance(ordered, Order)
            return ordered if by_size else Value()
        call = spelled(node, self.reading)
        if call is None or not call.args:
            return Value()
        rule: Callable[[Call, Value], Value] | None = getattr(self, f"_of_{call.name}", None)
        first = self.value(call.args[0])
        if rule is not None:
            return rule(call, first)
        if isinstance(first, Counts) and call.name in _HOST:
            return first
        if isinstance(first, Hits) and call.name in _HOST | {"squeeze", "flatten", "view"}:
            form = "int" if call.name == "tolist" else "scalar"
            return first if call.name in _HOST - {"tolist"} else Hits(first.counts, form)
        if isinstance(first, Named) and call.name in _SAME_ELEMENTS:
            return first
        if isinstance(first, Mask) and call.name in _SAME_ELEMENTS - _HOST and call.name != "type":
            return self._reshaped(call, first)
        if isinstance(first, Mask) and call.name in {"long", "int", "to", "float", "detach"}:
            return first
        if isinstance(first, Order) and call.name in _SAME_ELEMENTS:
            return first
        return Value()

    def key_of(self, node: ast.expr) -> Key | None:
        """Return the choice that a tensor of ids holds."""
        value = self.value(node)
        return value.key if isinstance(value, Named) else None

    def unchanged(self, counts: Counts) -> bool:
        """Whether the expression of some counts still has the value it had."""
        return all(
            self.name(name) is value or self.name(name) == value for name, value in counts.reads
        )

    def _reads(self, node: ast.expr) -> tuple[tuple[str, Value], ...]:
        names = _names(node) & self.reading.locals
        return tuple((name, self.name(name)) for name in sorted(names))

    def _unpack(self, targets: list[ast.expr], node: ast.expr) -> None:
        names = [target for target in targets if isinstance(target, ast.Name)]
        shape = isinstance(node, ast.Attribute) and node.attr == "shape"
        key = None
        if shape and isinstance(node, ast.Attribute):
            value = self.value(node.value)
            key = value.key if isinstance(value, Named | Mask) else None
            if isinstance(value, Mask) and isinstance(node.value, ast.Name):
                ranked = Mask(value.key, value.axis, len(targets), value.signed, value.classes)
                self.values[node.value.id] = ranked
        call = spelled(node, self.reading)
        sort = call is not None and call.name == "sort" and len(targets) == 2
        sorted_key = self.key_of(call.args[0]) if call is not None and sort else None
        for name in names:
            self.forget(name.id)
            place = targets.index(name)
            if key is not None:
                self.values[name.id] = Size(key, place - len(targets))
            if sorted_key is not None and place == 1:
                self.values[name.id] = Order(sorted_key)
        for target in targets:
            if not isinstance(target, ast.Name):
                self.write(target)

    def _subscript(self, node: ast.Subscript) -> Value:
        value = self.value(node.value)
        parts = index_parts(node)
        if isinstance(value, Hits):
            if value.element == "table" and whole_number(parts[0]) == 0:
                return Hits(value.counts, "scalar")
            if all(is_full_slice(part) for part in parts):
                return value
            column = len(parts) == 2 and is_full_slice(parts[0]) and whole_number(parts[1]) == 0
            return Hits(value.counts, "scalar") if column and value.element == "row" else Value()
        by_row = self.value(parts[0]) if len(parts) == 1 else Value()
        if isinstance(by_row, Order):
            return by_row
        if isinstance(value, Value) and len(parts) == 1 and self._is_sort(node.value):
            call = spelled(node.value, self.reading)
            key = self.key_of(call.args[0]) if call is not None else None
            return Order(key) if key is not None and whole_number(parts[0]) == 1 else Value()
        return Value()

    def _is_sort(self, node: ast.expr) -> bool:
        call = spelled(node, self.reading)
        return call is not None and call.name == "sort" and bool(call.args)

    # One rule for each op that makes a fact.

    def _of_one_hot(self, call: Call, ids: Value) -> Value:
        classes = call.argument(1, "num_classes")
        if not isinstance(ids, Named) or classes is None:
            return Value()
        return Mask(ids.key, -1, None, classes=classes)

    def _of_permute(self, call: Call, mask: Value) -> Value:
        order = call.numbers(1, "dims")
        if order is None:
            return Value()
        rank = len(order)
        if isinstance(mask, Named):  # a mask that the caller made
            mask = Mask((*mask.key, "mask"), -1, rank, signed=True)
        if not isinstance(mask, Mask):
            return Value()
        axis = order.index(mask.axis % rank) if mask.axis % rank in order else None
        if axis not in (0, rank - 1):
            return Value()
        return Mask(mask.key, 0 if axis == 0 else -1, rank, mask.signed, mask.classes)

    def _of_bool(self, call: Call, value: Value) -> Value:
        if isinstance(value, Named):
            return Mask((*value.key, "mask"), -1, None)
        if isinstance(value, Mask):
            return Mask(value.key, value.axis, value.rank, False, value.classes)
        return Value()

    def _of_scatter(self, call: Call, _: Value) -> Value:
        return self._scattered(call) or Value()

    def _scattered(self, call: Call) -> Mask | None:
        """``zeros(T, E).scatter(1, ids, 1)``: ones where a token chose an expert."""
        if call.name not in ("scatter", "scatter_") or len(call.args) != 4:
            return None
        key, one = self.key_of(call.args[2]), whole_number(call.args[3])
        if key is None or one != 1 or call.number(1, "dim") not in (1, -1):
            return None
        made = call.args[0]
        if isinstance(made, ast.Name) and self.name(made.id) == Named((made.id, 1)):
            made = self.reading.definition(made.id) or made
        zeros = spelled(made, self.reading)
        if zeros is None or zeros.name not in ("zeros", "new_zeros"):
            return None
        sizes = zeros.args[1:] if zeros.name == "new_zeros" else zeros.args
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
            sizes = sizes[0].elts
        return Mask(key, -1, 2, classes=sizes[1]) if len(sizes) == 2 else None

    def _of_sum(self, call: Call, mask: Value) -> Value:
        axes = call.numbers(1, "dim")
        if not isinstance(mask, Mask) or axes is None:
            return Value()
        rank = mask.rank or len(axes) + 1
        expert_axis = mask.axis % rank
        if sorted(axis % rank for axis in axes) != [n for n in range(rank) if n != expert_axis]:
            return Value()
        whole = Mask(mask.key, mask.axis, rank, mask.signed, mask.classes)
        return Counts(mask.key, whole, call.node, mask.classes, self._reads(call.node))

    def _of_bincount(self, call: Call, ids: Value) -> Value:
        if not isinstance(ids, Named) or call.argument(1, "weights") is not None:
            return Value()
        size = call.argument(2, "minlength")
        return Counts(ids.key, None, call.node, size, self._reads(call.node))

    def _of_cumsum(self, call: Call, counts: Value) -> Value:
        if not isinstance(counts, Counts) or call.number(1, "dim") not in (0, -1):
            axis = call.number(1, "axis")
            if not isinstance(counts, Counts) or axis not in (0, -1):
                return Value()
        if counts.running or counts.positive:
            return Value()
        return replace(counts, running=True)

    def _of_gt(self, call: Call, counts: Value) -> Value:
        if not isinstance(counts, Counts) or counts.running or call.number(1, "other") != 0:
            return Value()
        return replace(counts, positive=True)

    def _of_nonzero(self, call: Call, counts: Value) -> Value:
        if not isinstance(counts, Counts) or counts.running:
            return Value()
        as_tuple = call.kwargs.get("as_tuple")
        table = isinstance(as_tuple, ast.Constant) and as_tuple.value is True
        signed = counts.mask is not None and counts.mask.signed and not counts.positive
        return Value() if signed else Hits(counts, "table" if table else "row")

    def _of_where(self, call: Call, counts: Value) -> Value:
        if len(call.args) != 1 or not isinstance(counts, Counts) or counts.running:
            return Value()
        return Hits(counts, "table")

    def _of_argsort(self, call: Call, ids: Value) -> Value:
        return Order(ids.key) if isinstance(ids, Named) else Value()

    def _of_div(self, call: Call, order: Value) -> Value:
        return order if isinstance(order, Order) else Value()

    def _of_index_select(self, call: Call, _: Value) -> Value:
        index = self.value(call.args[2]) if len(call.args) == 3 else Value()
        return index if isinstance(index, Order) and call.number(1, "dim") == 0 else Value()

    def _reshaped(self, call: Call, mask: Mask) -> Value:
        """``mask.reshape(tokens, experts)``: the axes before the experts become one."""
        sizes = call.args[1:]
        if call.name not in ("view", "reshape") or len(sizes) != 2 or mask.axis != -1:
            return Value()
        last = self.value(sizes[1])
        if isinstance(last, Size) and last.axis == -1 and last.key == mask.key:
            return Mask(mask.key, -1, 2, mask.signed, copy.copy(mask.classes))
        return Value()


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
