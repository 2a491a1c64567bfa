"""The sum over the copies of each token, which the un-permuting ops share.

``out[i] = sum over k of rows[sorted_indices[i * topK + k] - start] * probs[i, k]``, k ascending, in
fp32 with a rounding after each product and each addition and one final rounding. A copy is skipped,
not multiplied by 0, when its place is outside of the window ``[start, end)`` of places that have a
row, or when its prob is 0: what its row holds does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.opdef import Call


@dataclass(frozen=True)
class Sum:
    """What is summed.

    Attributes:
        rows: ``[R, H]``.
        place: ``[T * topK]`` int32, place of each copy.
        tokens: T.
        top_k: topK.
        probs: ``[T, topK]``, None for 1.
        window: places that have a row; that of ``start`` is row 0.
    """

    rows: torch.Tensor
    place: torch.Tensor
    tokens: int
    top_k: int
    probs: torch.Tensor | None
    window: tuple[int, int]

    def compute(self, op: Call) -> torch.Tensor:
        """Return the sums, as output 0 of `op`."""
        hidden = self.rows.shape[1]
        output = op.new_output((self.tokens, hidden), self.rows.dtype, self.rows.device)
        start, end = self.window
        if self.top_k == 0 or end <= start:
            return output.zero_()
        # One k is one contiguous row.
        place = self.place.view(self.tokens, self.top_k).t().contiguous()
        counted = self._counted(place)
        if counted is not None:
            place = place.masked_fill(~counted, start)
        row = place - start if start else place

        def work(chunk: slice) -> None:
            y = output[chunk]
            total = y if y.dtype is torch.float32 else torch.empty_like(y, dtype=torch.float32)
            for k in range(self.top_k):
                part = self._part(row, k, chunk, total if k == 0 else None)
                if k > 0:
                    _add(total, part, None if counted is None else counted[k, chunk])
                elif counted is not None:
                    total.masked_fill_(~counted[k, chunk].unsqueeze(1), 0.0)
            if total is not y:
                y.copy_(total)

        run_parts(work, row_chunks(self.tokens, hidden))
        return output

    def _counted(self, place: torch.Tensor) -> torch.Tensor | None:
        """Return ``[topK, T]`` bool, the copies that are not skipped; None for all."""
        start, end = self.window
        low, high = (int(bound) for bound in torch.aminmax(place)) if place.numel() else (start, 0)
        counted = None
        if low < start or high >= end:
            counted = (place >= start) & (place < end)
        if self.probs is not None:
            has_weight = (self.probs != 0).t()
            if not bool(has_weight.all()):
                counted = has_weight if counted is None else counted & has_weight
        return counted

    def _part(
        self, row: torch.Tensor, k: int, chunk: slice, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the fp32 terms of copies (chunk, k), written to `out` where that is given."""
        part = self.rows.index_select(0, row[k, chunk])
        if out is not None:
            part = out.copy_(part)
        elif part.dtype is not torch.float32 and self.probs is not None:
            part = part.to(torch.float32)
        if self.probs is not None:
            part.mul_(self.probs[chunk, k : k + 1].to(torch.float32))
        return part

    def naive(self) -> torch.Tensor:
        """Return the sums as the definition reads."""
        output = torch.empty((self.tokens, self.rows.shape[1]), dtype=self.rows.dtype)
        start, end = self.window
        for i in range(self.tokens):
            total = torch.zeros(self.rows.shape[1])
            for k in range(self.top_k):
                place = int(self.place[i * self.top_k + k])
                prob = None if self.probs is None else self.probs[i, k].to(torch.float32)
                if not start <= place < end or prob == 0:
                    continue
                part = self.rows[place - start].to(torch.float32)
                part = part if prob is None else part * prob
                total = part if k == 0 else total + part
            output[i] = total
        return output


def _add(total: torch.Tensor, part: torch.Tensor, counted: torch.Tensor | None) -> None:
    if counted is None:
        total.add_(part)
    else:
        # A select, not a product with 0: NaN and infinities of skipped rows must not show.
        torch.where(counted.unsqueeze(1), total + part, total, out=total)
