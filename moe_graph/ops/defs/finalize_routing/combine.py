"""The sum over the copies of each token, which the MoeFinalizeRouting ops share.

A copy (i, k) is choice k of token i. Here copies stand k-major, in tensors ``[K, T]``, so that
one k is one contiguous row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.finalize_routing.special_experts import SpecialExperts
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Call


@dataclass(frozen=True)
class Copies:
    """The copies of all tokens.

    Attributes:
        row: ``[K, T]`` row of expanded_x, -1 for a dropped copy.
        expert: ``[K, T]`` expert id, None when nothing depends on it.
        special: those whose row is replaced, None when the call has no such experts.
        may_drop: row -1 is allowed.
    """

    row: torch.Tensor
    expert: torch.Tensor | None
    special: SpecialExperts | None = None
    may_drop: bool = False

    def check(self, op: Call, rows: int, expert_argument: str) -> None:
        """Raise on rows and expert ids that do not exist.

        Raises:
            OpError: a row is none of the `rows` of expanded_x, or an expert has no bias.
        """
        low = -1 if self.may_drop else 0
        with_row = self.row if self.special is None else self.row[~self.special.any]
        check_range(op, "expanded_row_idx", with_row, low, rows, "the rows of expanded_x")
        if op.bias is not None:
            assert self.expert is not None
            biased = self.expert if self.special is None else self.expert[~self.special.zero]
            check_range(op, expert_argument, biased, 0, op.bias.shape[0], "the rows of bias")

    def counted(self) -> torch.Tensor | None:
        """Return ``[K, T]`` bool, the copies that enter the sum; None for all."""
        counted = self.row >= 0 if self.may_drop else None
        if self.special is None:
            return counted
        if counted is None:
            return ~self.special.zero
        return (counted | self.special.any) & ~self.special.zero


def sum_dtype(op: Call) -> torch.dtype:
    """Return the dtype of the sums: float16 rows are summed in float16 on A2 and A3."""
    in_half = op.expanded_x.dtype is torch.float16 and op.soc is not Soc.ASCEND950
    return torch.float16 if in_half else torch.float32


def combine(op: Call, copies: Copies) -> torch.Tensor:
    """Return ``x1 + x2 + sum over k of scales * (row + bias)``, k ascending."""
    hidden = op.expanded_x.shape[-1]
    rows = op.expanded_x.reshape(-1, hidden)
    if rows.shape[0] == 0:
        rows = rows.new_zeros((1, hidden))  # what dropped copies point to
    counted = copies.counted()
    index = copies.row
    if counted is not None:
        inside = (index >= 0) & (index < rows.shape[0])
        index = torch.where(inside, index, 0)
    experts = copies.expert if op.bias is not None else None
    if experts is not None and copies.special is not None:
        experts = torch.where(copies.special.zero, 0, experts)
    top_k, tokens = index.shape
    output = op.new_output((tokens, hidden), rows.dtype, rows.device)

    def work(chunk: slice) -> None:
        y = output[chunk]
        dtype = sum_dtype(op)
        total = y if y.dtype is dtype else torch.empty_like(y, dtype=dtype)
        _start(op, chunk, total)
        for k in range(top_k):
            part = rows.index_select(0, index[k, chunk]).to(dtype)
            if copies.special is not None:
                part = copies.special.replace(part, k, chunk)
            if experts is not None:
                part.add_(op.bias.index_select(0, experts[k, chunk]))
            if op.scales is not None:
                part.mul_(op.scales[chunk, k : k + 1])
            if counted is None:
                total.add_(part)
            else:
                # A select, not a product with 0: dropped copies must not touch the sum.
                torch.where(counted[k, chunk].unsqueeze(1), total + part, total, out=total)
        if total is not y:
            y.copy_(total)

    run_parts(work, row_chunks(tokens, hidden))
    return output


def _start(op: Call, chunk: slice, total: torch.Tensor) -> None:
    """Set `total` to ``x1 + x2``."""
    if op.x1 is None:
        total.zero_()
    else:
        total.copy_(op.x1[chunk])
    if op.x2 is not None:
        total.add_(op.x2[chunk])
