"""Checks of an op on real tensors, made once for each set of shapes, dtypes and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.ir import TensorSpec
from moe_graph.ops.opdef import OpDef, Specs

_REMEMBERED = 1024
"""Sets that are remembered per op; a graph of unknown sizes may bring any number."""


class ChecksOnce:
    """:meth:`OpDef.bind_attrs` and :meth:`OpDef.infer` with a memory."""

    def __init__(self, opdef: OpDef) -> None:
        self._opdef = opdef
        self._known: dict[Any, tuple[dict[str, Any], Specs]] = {}

    def __call__(
        self, inputs: Sequence[Any], given: dict[str, Any], soc: Soc
    ) -> tuple[dict[str, Any], Specs]:
        """Return the complete attributes and the output specs.

        Args:
            inputs: per IR input a tensor, a sequence of tensors or None.
            given: attributes that are given.
            soc: the product.

        Raises:
            OpError: a dtype, shape or attribute that the op does not take.
        """
        key = (tuple(map(_signature, inputs)), tuple(map(_hashable, given.items())), soc)
        known = self._known.get(key)
        if known is None:
            attrs = self._opdef.bind_attrs(given)
            specs = self._opdef.infer(specs_of(inputs), attrs, soc)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = (attrs, specs)
        return known


def specs_of(inputs: Sequence[Any]) -> list[Any]:
    """Return the specs of tensors, lists of tensors and None, in that structure."""
    return [
        None
        if value is None
        else [TensorSpec.of(item) for item in value]
        if isinstance(value, (list, tuple))
        else TensorSpec.of(value)
        for value in inputs
    ]


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return None if value is None else tuple(map(_signature, value))


def _hashable(item: tuple[str, Any]) -> tuple[str, type, Any]:
    # 1, 1.0 and True are equal as keys, but not all of one attribute type.
    name, value = item
    return name, type(value), tuple(value) if isinstance(value, list) else value
