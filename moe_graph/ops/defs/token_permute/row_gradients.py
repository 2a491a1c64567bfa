"""Gradients of rows and probs, which the gradients of the un-permuting ops share.

With copy ``c = i * topK + k``, at place ``sorted_indices[c]`` in the window ``[start, end)``, and
its row ``r = sorted_indices[c] - start``,

- ``rows_grad[r] = grad[i] * probs[i, k]``; rows of no copy stay unwritten;
- ``probs_grad[i, k] = sum over h of rows[r, h] * grad[i, h]`` in fp32, 0 for a copy without a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        rows: ``[R, H]``, None when there are no probs.
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

    def compute(self, op: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of the rows, as output 0 of `op`, and of the probs."""
        copy_of_row = self._copy_of_row(op)
        hidden = self.grad.shape[1]
        output = op.new_output((self.count, hidden), self.grad.dtype, self.grad.device)
        probs, written = self.probs, copy_of_row.shape[0]
        filled = copy_of_row >= 0
        all_filled = bool(filled.all())
        copy = copy_of_row if all_filled else copy_of_row.clamp(min=0)
        token = torch.div(copy, max(self.top_k, 1), rounding_mode="floor")
        if self.grad.shape[0] == 0 or self.top_k == 0:
            return poison_(output), None if probs is None else torch.zeros_like(probs)
        weight = dot = None
        if probs is not None:
            weight = probs.reshape(-1).index_select(0, copy).to(torch.float32).unsqueeze(1)
            dot = weight.new_empty(written)

        def work(chunk: slice) -> None:
            part = self.grad.index_select(0, token[chunk])
            if self.rows is None or weight is None or dot is None:
                output[chunk] = part
                return
            part = part.to(torch.float32)
            torch.sum(part * self.rows[chunk], 1, out=dot[chunk])
            torch.mul(part, weight[chunk], out=output[chunk])

        # Row by row, not copy by copy: rows and their gradient are then read and written in order.
        run_parts(work, row_chunks(written, hidden))
        poison_(output[written:])
        if not all_filled:
            output[:written].masked_fill_(~filled.unsqueeze(1), torch.nan)
        if probs is None or dot is None:
            return output, None
        probs_grad = torch.zeros_like(probs, memory_format=torch.contiguous_format)
        probs_grad.view(-1)[copy_of_row[filled]] = dot[filled].to(probs.dtype)
        return output, probs_grad

    def _copy_of_row(self, op: Call) -> torch.Tensor:
        """Return the copy that each row of the window belongs to, -1 for a row of no copy.

        Raises:
            OpError: two copies share a row, so that its gradient would be written twice.
        """
        start, end = self.window
        place = self.place[: self.grad.shape[0] * self.top_k]
        copy = torch.arange(place.shape[0], dtype=torch.int32, device=place.device)
        inside = (place >= start) & (place < end)
        if bool(inside.all()):
            row = place.to(torch.int64)
        else:
            row, copy = place[inside].to(torch.int64), copy[inside]
        if start:
            row.sub_(start)
        copy_of_row = torch.full((end - start,), -1, dtype=torch.int32, device=place.device)
        copy_of_row[row] = copy
        if (distinct := int((copy_of_row >= 0).sum())) != row.shape[0]:
            raise op.error(
                "sorted_indices",
                got=f"{distinct} rows for {row.shape[0]} copies",
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
