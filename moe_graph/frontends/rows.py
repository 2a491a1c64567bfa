"""Experts that are alike, and whether one returns a row per row of its input, for none as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

_ROWS = (0, 3)
_PLAIN = (int, float, str, bool, type(None), tuple)


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return one of each kind of modules: equal classes, sizes, settings and hooks throughout."""
    return list({_kind(module): module for module in modules}.values())


def keeps_rows(module: nn.Module) -> bool:
    """Whether ``module(x)`` has as many rows as ``x`` ``[N, H]``, for no rows and for three.

    The module is run on tensors without data. H is the width of its first linear layer; without
    one the answer is False.
    """
    first = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    if first is None:
        return False
    width, weight = first.in_features, first.weight
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return all(module(weight.new_empty(rows, width)).shape[0] == rows for rows in _ROWS)
    except Exception:  # whatever it is that fails, the answer is no
        return False


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, *_own_kind(part)) for name, part in module.named_modules())


def _own_kind(module: nn.Module) -> tuple[Any, ...]:
    held = vars(module)
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if t is None else (t.shape, t.dtype)) for name, t in tensors)
    others = tuple(
        (name, value if isinstance(value, _PLAIN) and _hashable(value) else type(value))
        for name, value in held.items()
        if name not in ("_parameters", "_buffers", "_modules")
    )
    hooks = tuple(name for name, value in held.items() if name.endswith("_hooks") and value)
    return type(module), shapes, others, hooks


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
