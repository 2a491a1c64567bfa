"""Arithmetic of half-precision floats: compute in fp32, round once per GE node.

PyTorch's own elementwise, softmax, sum and mean kernels do so already. Kernels made of several
PyTorch calls, or whose PyTorch kernel rounds in between, are wrapped in :func:`in_fp32`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_graph.emulator.engine.dtypes import HALF

Function = TypeVar("Function", bound=Callable[..., Any])


def widen(value: Any) -> Any:
    """Return half-precision tensors as fp32, lists of tensors element by element."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [widen(each) for each in value]
    return value


def in_fp32(function: Function) -> Function:
    """Run a kernel on fp32 copies of its half-precision inputs and round its float results.

    The results get the dtype of the first tensor input. With other dtypes nothing changes.
    """

    @functools.wraps(function)
    def wrapped(first: Any, *rest: Any, **attrs: Any) -> Any:
        dtype = (first[0] if isinstance(first, list) else first).dtype
        if dtype not in HALF:
            return function(first, *rest, **attrs)
        result = function(widen(first), *map(widen, rest), **attrs)
        if isinstance(result, torch.Tensor):
            return _narrow(result, dtype)
        return tuple(_narrow(each, dtype) for each in result)

    return wrapped  # type: ignore[return-value]


def _narrow(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return result.to(dtype) if result.dtype == torch.float32 else result
