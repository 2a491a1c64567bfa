"""Runs a function through dynamo, AOT, TorchAir's converters and the GE engine.

The oracle is the same function, eager, on the same CPU tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchair
from torch.utils import _pytree as pytree

import moe_graph  # noqa: F401  (loads the emulated CANN before torch)
from moe_graph.emulator.engine import session

#: dtype -> (rtol, atol) of a single op against eager.
TOLERANCE = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """Return `function` compiled by plain TorchAir."""
    torch._dynamo.reset()
    return torch.compile(
        function, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )


def to_npu(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda each: each.npu(), values)


def to_cpu(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda each: each.cpu(), values)


def assert_same(got: Any, want: Any, tolerance: tuple[float, float] | None = None) -> None:
    """Compare outputs: equal dtypes and shapes, integers exactly, floats within a tolerance."""
    got, want = pytree.tree_leaves(to_cpu(got)), pytree.tree_leaves(want)
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if isinstance(b, torch.Tensor):
            rtol, atol = tolerance or TOLERANCE.get(b.dtype, (0, 0))
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True,
                msg=lambda text, index=index: f"output {index}: {text}",
            )  # fmt: skip
        else:
            assert a == b


def check(
    function: Callable[..., Any],
    *runs: Sequence[Any],
    dynamic: bool | None = False,
    tolerance: tuple[float, float] | None = None,
    oracle: Callable[..., Any] | None = None,
) -> Counter[str]:
    """Compile `function` once, run it on every argument list, compare each run with eager.

    Args:
        oracle: what to compare with, `function` itself by default.

    Returns:
        GE op type -> number of nodes, over the graphs that were compiled.
    """
    before = set(session.node_counts())
    program = compiled(function, dynamic=dynamic)
    for args in runs:
        want = (oracle or function)(*args)
        for _ in range(2):  # the first run of a plan checks more than later ones
            assert_same(program(*to_npu(args)), want, tolerance)
    types: Counter[str] = Counter()
    for key, of_graph in session.node_counts().items():
        if key not in before:
            for counts in of_graph.values():
                types.update(counts)
    return types
