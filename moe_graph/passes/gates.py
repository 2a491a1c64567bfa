"""The gated activation that SwiGlu computes: ``silu(gate) * up`` on the two halves of one product.

Before::

    gate, up = y.chunk(2, dim=-1)          y.split(I, -1)          y[..., :I], y[..., I:]
    h = F.silu(gate) * up                  up * F.silu(gate)

After::

    h = moe_graph.swi_glu(y, dim=-1)

Any other gate (another activation, clamps, interleaved halves, up first) stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moe_graph.passes import meta
from moe_graph.passes.analysis import Facts
from moe_graph.passes.canonical import Call


def swiglu_input(facts: Facts, node: Node) -> Node | None:
    """Return `y` if `node` is ``silu(first half of y) * second half of y``, None otherwise."""
    call = facts.calls[node]
    if call.op != "mul" or call.writes is not None:
        return None
    for activated, other in (("input", "other"), ("other", "input")):
        silu = facts.calls.get(call[activated]) if isinstance(call[activated], Node) else None
        if silu is None or silu.op != "silu" or silu.writes is not None:
            continue
        gate, up = _half(facts, silu["input"]), _half(facts, call[other])
        if gate is None or up is None or gate[0] is not up[0] or (gate[1], up[1]) != (0, 1):
            continue
        source = gate[0]
        start = facts.position[source]
        same_dtype = meta.dtype(source) == meta.dtype(node)
        if same_dtype and _unwritten_after_views(facts, source, start, node):
            return source
    return None


def _unwritten_after_views(facts: Facts, source: Node, start: int, node: Node) -> bool:
    """Tell whether both halves still show `source` as it is at `node`."""
    first_view = min(
        (facts.position[user] for user in source.users if facts.calls[user].writes is None),
        default=start,
    )
    return facts.memory.written_between(source, first_view, facts.position[node]) is None


def _half(facts: Facts, node: Any) -> tuple[Node, int] | None:
    """Return (whole, 0 or 1) if `node` is one half of `whole` along the last dimension."""
    call = facts.calls.get(node) if isinstance(node, Node) else None
    if call is None:
        return None
    if call.op == "result":
        return _half_of_parts(facts.calls[call["input"]], call["index"])
    if call.op == "slice":
        return _half_of_slice(call)
    return None


def _half_of_parts(parts: Call, index: int) -> tuple[Node, int] | None:
    if parts.op not in ("chunk", "split"):
        return None
    whole = parts["input"]
    dims = meta.shape(whole)
    if meta.wrap_dim(parts["dim"], len(dims)) != len(dims) - 1:
        return None
    size = parts["chunks"] if parts.op == "chunk" else parts["split_size"]
    width = dims[-1]
    if not isinstance(width, int) or width % 2:
        return None
    halves = (2,) if parts.op == "chunk" else (width // 2, [width // 2] * 2, (width // 2,) * 2)
    return (whole, index) if size in halves else None


def _half_of_slice(call: Call) -> tuple[Node, int] | None:
    whole = call["input"]
    dims = meta.shape(whole)
    width, last = dims[-1], call["index"][-1]
    leading = call["index"][:-1]
    if leading != (Ellipsis,) and leading != (slice(None),) * (len(dims) - 1):
        return None
    if not isinstance(width, int) or width % 2 or not isinstance(last, slice):
        return None
    if last.step not in (None, 1):
        return None
    bounds = (last.start or 0, width if last.stop is None else last.stop)
    half = width // 2
    return (whole, 0) if bounds == (0, half) else (whole, 1) if bounds == (half, width) else None
