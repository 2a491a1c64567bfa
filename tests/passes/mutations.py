"""Break a captured graph at one place: another operand of the same shape, or another number."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

Mutation = Callable[[GraphModule], None]


class _Examples(Interpreter):
    """Fills in example values."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value


def with_examples(gm: GraphModule, inputs: list[torch.Tensor]) -> bool:
    """Recompute the example values of a graph; False where it cannot be traced."""
    try:
        with FakeTensorMode() as mode, torch.no_grad():
            _Examples(gm).run(*[mode.from_tensor(x) for x in inputs])
    except (AssertionError, RuntimeError, IndexError, TypeError, ValueError):
        return False
    return True


def mutations(gm: GraphModule, count: int, seed: int) -> Iterator[tuple[str, GraphModule]]:
    """Yield copies of `gm` with one change each, and what the change is."""
    chooser = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(gm)
        described = change(chooser, changed.graph.nodes)
        if described:
            changed.recompile()
            yield described, changed


def change(chooser: random.Random, nodes: Iterable[Node]) -> str | None:
    """Break one of `nodes` and say how; None where the one that was drawn cannot be."""
    node = chooser.choice([n for n in nodes if n.op in ("call_function", "call_method")])
    return _swap_operand(chooser, node) or _change_number(chooser, node)


def _swap_operand(chooser: random.Random, node: Node) -> str | None:
    """Replace one operand by an earlier node of the same shape and dtype."""
    if chooser.random() < 0.4:
        return None
    earlier: list[Node] = []
    for other in node.graph.nodes:
        if other is node:
            break
        earlier.append(other)
    operands = [n for n in node.all_input_nodes if isinstance(_value(n), torch.Tensor)]
    if not operands:
        return None
    old = chooser.choice(operands)
    same = [n for n in earlier if n is not old and _alike(_value(n), _value(old))]
    if not same:
        return None
    new = chooser.choice(same)
    node.replace_input_with(old, new)
    return f"{node.name}: {old.name} -> {new.name}"


def _change_number(chooser: random.Random, node: Node) -> str | None:
    """Replace one whole number among the arguments."""
    places: list[tuple[str, Any]] = [("args", i) for i, a in enumerate(node.args) if type(a) is int]
    places += [("kwargs", k) for k, a in node.kwargs.items() if type(a) is int]
    if not places:
        return None
    kind, key = chooser.choice(places)
    old = node.args[key] if kind == "args" else node.kwargs[key]
    new = old + chooser.choice([-1, 1, 2])  # type: ignore[operator]
    if kind == "args":
        node.update_arg(key, new)
    else:
        node.update_kwarg(key, new)
    return f"{node.name}: {key} {old} -> {new}"


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _alike(left: Any, right: Any) -> bool:
    tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return tensors and left.shape == right.shape and left.dtype == right.dtype
