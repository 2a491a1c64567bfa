"""What MoeGatingTopKSoftmax and its V2 share: shapes, limits, selection and gradient."""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.gating.norms import (
    SOFTMAX,
    normalise,
    normalise_grad,
    normalise_in_chunks,
    scatter_to_experts,
)
from moe_graph.ops.defs.gating.ranking import ranked, top_indices
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import UNKNOWN_RANK, Dim, known_less
from moe_graph.ops.ir import show_shape
from moe_graph.ops.limit import dim
from moe_graph.ops.opdef import Call, Limit

FLOATS = (torch.float16, torch.float32, torch.bfloat16)
MAX_K = 1024


def selected_shape(op: Call) -> tuple[Dim, ...]:
    """Return the shape of the selection, unknown where that of x is.

    Raises:
        OpError: x has not 2 or 3 dimensions, or k is not in ``[1, min(1024, E)]``.
    """
    if not 1 <= op.k <= MAX_K:
        raise op.error("k", got=op.k, want=f"in [1, {MAX_K}]")
    if not op.x.rank_known:
        return UNKNOWN_RANK
    shape: tuple[Dim, ...] = op.x.shape
    if len(shape) not in (2, 3):
        raise op.error("x", got=f"shape {show_shape(shape)}", want="2 or 3 dimensions")
    if known_less(shape[-1], op.k):
        raise op.error("k", got=op.k, want=f"<= {shape[-1]}, the number of experts")
    return (*shape[:-1], op.k)


def check_finished(op: Call) -> None:
    """Raise unless finished has one value per row of x.

    Raises:
        OpError: it has not.
    """
    if op.finished is None or not op.x.rank_known:
        return
    rows = op.x.shape[:-1]
    for axis, (got, want) in enumerate(zip(op.dims("finished", len(rows)), rows, strict=True)):
        op.expect_equal("finished", got, want, f"dim {axis}")


def limits(source: str) -> tuple[Limit, ...]:
    """Return the limits of both versions, found in `source`."""
    return (Limit("x", "E", dim("x", -1), source, low=1, high=2048, products=(Soc.ASCEND950,)),)


def select(op: Call, *, renorm: bool, scores_into: torch.Tensor | None = None) -> list[Any]:
    """Return y and expert_idx; write the softmax of all logits into `scores_into`.

    `renorm`: the softmax is that of the k selected logits alone.
    """
    logits, finished, y, expert_idx = _rows(op)
    experts = logits.shape[-1]
    everything = None if scores_into is None else scores_into.view(-1, experts)

    def work(chunk: slice) -> None:
        part = logits[chunk]
        scores = part.to(torch.float32) if renorm else normalise(part, SOFTMAX)
        chosen = top_indices(scores, op.k)
        values = scores.gather(1, chosen)
        y[chunk] = normalise(values, SOFTMAX) if renorm else values
        if finished is not None:
            chosen.masked_fill_(finished[chunk], experts)
        expert_idx[chunk] = chosen
        if everything is not None:
            everything[chunk] = scores

    run_parts(work, row_chunks(*logits.shape))
    return _shaped(op, y, expert_idx)


def select_naively(op: Call, *, renorm: bool) -> list[Any]:
    """:func:`select` by its definition, row by row."""
    logits, finished, y, expert_idx = _rows(op)
    scores = logits.to(torch.float32) if renorm else normalise_in_chunks(logits, SOFTMAX)
    for row, row_scores in enumerate(scores):
        chosen = torch.tensor(ranked(row_scores.tolist())[: op.k])
        values = row_scores[chosen]
        y[row] = normalise(values, SOFTMAX) if renorm else values
        done = finished is not None and bool(finished[row])
        expert_idx[row] = logits.shape[-1] if done else chosen
    return _shaped(op, y, expert_idx)


def _rows(op: Call) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return x, finished, y and expert_idx with one row per token."""
    x: torch.Tensor = op.x
    shape = (*x.shape[:-1], op.k)
    rows = x.shape[:-1].numel()
    y = op.new_output(shape, x.dtype, x.device, 0).view(rows, op.k)
    expert_idx = op.new_output(shape, torch.int32, x.device, 1).view(rows, op.k)
    finished = None if op.finished is None else op.finished.reshape(rows, 1)
    return x.reshape(rows, x.shape[-1]), finished, y, expert_idx


def _shaped(op: Call, y: torch.Tensor, expert_idx: torch.Tensor) -> list[Any]:
    shape = (*op.x.shape[:-1], op.k)
    return [y.view(shape), expert_idx.view(shape)]


def save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    """Keep the logits and the selection."""
    ctx.has_finished = op.finished is not None
    ctx.save_for_backward(op.x, outputs[1])


def grad_of_logits(
    ctx: Any,
    grad_y: torch.Tensor,
    *,
    renorm: bool,
    grad_scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of x, given that of y and of the softmax of all logits.

    Raises:
        NotImplementedError: the call had finished rows.
    """
    if ctx.has_finished:
        raise NotImplementedError(
            "moe_gating_top_k_softmax has no gradient with finished: expert_idx does not say which "
            "experts a finished row had selected"
        )
    x, expert_idx = ctx.saved_tensors
    grad = grad_y.to(torch.float32)
    if renorm:
        logits = x.to(torch.float32).gather(-1, expert_idx.to(torch.int64))
        weights = normalise(logits, SOFTMAX)
        grad = normalise_grad(logits, weights, grad, SOFTMAX)
        return scatter_to_experts(x, expert_idx, grad).to(x.dtype)
    scores = normalise(x, SOFTMAX)
    grad = scatter_to_experts(x, expert_idx, grad)
    if grad_scores is not None:
        grad = grad + grad_scores
    return normalise_grad(x, scores, grad, SOFTMAX).to(x.dtype)
