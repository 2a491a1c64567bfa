"""Gradients of rows and probs, which the gradients of the un-permuting ops share.

With copy ``c = i * topK + k``, at place ``sorted_indices[c]`` in the window ``[start, end)``, and
its row ``r = sorted_indices[c] - start``,

- ``rows_grad[r] = grad[i] * probs[i, k]``; rows of no copy stay unwritten;
- ``probs_grad[i, k] = sum over h of rows[r, h] * grad[i, h]`` in fp32, 0 for a copy without a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.poison import poison_, poisoned
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Call


def has_all_rows(rows: torch.Tensor, count: int | torch.SymInt) -> bool:
    """True where `rows` are known to be `count`; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(rows.shape[0] == count)


def leading_rows(rows: torch.Tensor, count: int | torch.SymInt) -> torch.Tensor:
    """Return the first `count` of `rows`: themselves where that is known to be all."""
    return rows if has_all_rows(rows, count) else rows[:count]


@dataclass(frozen=True)
class RowGradients:
    """What is differentiated.

    Attributes:
        grad: ``[T, H]``, gradient of the sums.
        place: ``[T * topK]`` int32 or longer, place of each copy; what is beyond is not read.
        rows: ``[R, H]``, read only when there are probs.
        probs: ``[T, topK]``, None for 1.
        top_k: topK.
        window: places that have a row.
        count: rows of the output.
    """

    grad: torch.Tensor
    place: torch.Tensor
    rows: torch.Tensor | None
    probs: torch.Tensor | None
    top_k: int
    window: tuple[int, int]
    count: int

    @staticmethod
    def of(op: Call, top_k: int, window: tuple[int, int] | None = None) -> RowGradients:
        """Return those of a gradient op, with `top_k` where it has no probs.

        Without a `window` the rows of permuted_tokens are the first places.

        Raises:
            OpError: an index is out of range.
        """
        copies: int = op.sorted_indices.shape[0]
        check_range(op, "sorted_indices", op.sorted_indices, 0, copies, "the copies")
        if window is None:
            rows = copies if op.permuted_tokens is None else op.permuted_tokens.shape[0]
            window = (0, min(copies, rows))
        return RowGradients(
            op.unpermuted_tokens_grad,
            op.sorted_indices,
            op.permuted_tokens,
            op.probs,
            top_k if op.probs is None else op.probs.shape[1],
            window,
            copies,
        )

    def compute(self, op: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of the rows, as output 0 of `op`, and of the probs."""
        copy_of_row = self._copy_of_row(op)
        hidden = self.grad.shape[1]
        output = op.new_output((self.count, hidden), self.grad.dtype, self.grad.device)
        rows, probs, written = self.rows, self.probs, copy_of_row.shape[0]
        weights = probs_grad = None
        if probs is not None:
            weights, probs_grad = probs.reshape(-1), probs.new_zeros(probs.shape)
        if self.grad.shape[0] == 0 or self.top_k == 0:
            return poison_(output), probs_grad
        all_filled = bool((copy_of_row >= 0).all())

        def work(chunk: slice) -> None:
            copy = copy_of_row[chunk]
            filled = None if all_filled else copy >= 0
            known = copy if filled is None else copy.clamp(min=0)
            part = self.grad.index_select(0, known.div(self.top_k, rounding_mode="floor"))
            if rows is None or weights is None or probs_grad is None:
                output[chunk] = part
            else:
                part = part.to(torch.float32)
                dot = torch.sum(part * rows[chunk], 1).to(weights.dtype)
                weight = weights.index_select(0, known).to(torch.float32)
                torch.mul(part, weight.unsqueeze(1), out=output[chunk])
                at, dot = (copy, dot) if filled is None else (copy[filled], dot[filled])
                probs_grad.view(-1).scatter_(0, at.to(torch.int64), dot)
            if filled is not None:
                output[chunk].masked_fill_(~filled.unsqueeze(1), torch.nan)

        # Row by row, not copy by copy: rows and their gradient are then read and written in order.
        run_parts(work, row_chunks(written, hidden))
        poison_(output[written:])
        return output, probs_grad

    def _copy_of_row(self, op: Call) -> torch.Tensor:
        """Return the copy that each row of the window belongs to, -1 for a row of no copy.

        Raises:
            OpError: two copies share a row, so that its gradient would be written twice.
        """
        start, end = self.window
        rows = end - start
        row = self.place[: self.grad.shape[0] * self.top_k].to(torch.int64)
        row = row.sub_(start) if start else row
        copies = row.shape[0]
        low, high = (int(bound) for bound in torch.aminmax(row)) if copies else (0, -1)
        if low < 0 or high >= rows:
            outside = (row < 0) | (row >= rows)
            row.masked_fill_(outside, rows)
            copies -= int(outside.sum())
        copy = torch.arange(row.shape[0], dtype=torch.int32, device=row.device)
        # One entry more, which takes all copies without a row.
        copy_of_row = torch.full((rows + 1,), -1, dtype=torch.int32, device=row.device)
        copy_of_row = copy_of_row.scatter_(0, row, copy)[:rows]
        del row, copy
        if (distinct := int((copy_of_row >= 0).sum())) != copies:
            raise op.error(
                "sorted_indices",
                got=f"{distinct} rows for {copies} copies",
                want="a row of its own for each copy",
            )
        return copy_of_row

    def naive(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients as the definition reads."""
        start, end = self.window
        tokens, hidden = self.grad.shape
        rows_grad = poisoned((self.count, hidden), self.grad.dtype, self.grad.device)
        probs_grad = None if self.probs is None else torch.zeros_like(self.probs)
        for i in range(tokens):
            grad = self.grad[i].to(torch.float32)
            for k in range(self.top_k):
                place = int(self.place[i * self.top_k + k])
                if not start <= place < end:
                    continue
                row = place - start
                if self.probs is None or self.rows is None or probs_grad is None:
                    rows_grad[row] = grad
                    continue
                rows_grad[row] = grad * self.probs[i, k].to(torch.float32)
                probs_grad[i, k] = (self.rows[row].to(torch.float32) * grad).sum()
        return rows_grad, probs_grad
