"""MoeInitRoutingV2Grad: gradient of the gather of MoeInitRoutingV2.

``grad_x[i] = sum over k of grad_expanded_x[expanded_row_idx[i * K + k]]``, added in fp32 in a fixed
order, rounded once. Copies that were dropped (index -1) or cut off (``active_num``) are skipped.
950 skips every index out of range, the others read out of bounds: an error here.

The order differs between products and is part of the result:

- A2, A3: ``2**e`` bins, ``e = max(0, floor(log2 K) - 1)`` (6 from K = 128 on). Even ``k`` fill and
  then add to the bins, odd ``k`` add to them, a binary tree folds the bins. K = 4 gives
  ``(x0 + x1) + (x2 + x3)``, K = 3 gives ``(x0 + x2) + x1``.
- 950: ``+0``, then groups of four ``(x0 + x1) + (x2 + x3)``, then what is left one by one; skipped
  rows take part as ``+0``. (Its split-K tiling restarts the groups at every chunk; that path is
  taken for K > 10 rows that do not fit the unified buffer and is not imitated.)
"""

from __future__ import annotations

import functools

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import floordiv
from moe_graph.ops.opdef import (
    REQUIRED,
    Attr,
    Call,
    Form,
    Input,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register

DROPLESS, DROP_PAD = 0, 1


def _shapes(op: Call) -> Specs:
    drop_pad = op.expect_one_of("drop_pad_mode", (DROPLESS, DROP_PAD)) == DROP_PAD
    op.expect_at_least("top_k", 1)
    op.expect_at_least("active_num", 0)
    hidden = op.dims("grad_expanded_x", rank=3 if drop_pad else 2)[-1]
    (copies,) = op.dims("expanded_row_idx", rank=1)
    return [TensorSpec((floordiv(copies, op.top_k), hidden), op.grad_expanded_x.dtype)]


def _tiling(op: Call) -> None:
    (copies,) = op.dims("expanded_row_idx", rank=1)
    if isinstance(copies, int) and copies >= 0 and copies % op.top_k:
        raise op.error(
            "expanded_row_idx", got=f"{copies} indices", want=f"a multiple of {op.top_k}"
        )
    if op.drop_pad_mode == DROPLESS:
        rows, _ = op.dims("grad_expanded_x", rank=2)
        expected = op.active_num if op.active_num > 0 else copies
        op.expect_equal("grad_expanded_x", rows, expected, "dim 0")


Add = tuple[int, int]
"""(bin, k): add the row of copy k to the bin."""


@functools.cache
def a2_order(top_k: int) -> tuple[list[int], list[Add], list[Add]]:
    """Return the A2/A3 order for `top_k`: copies that start the bins, adds, folds (into, from)."""
    exponent = 6 if top_k >= 128 else max(0, top_k.bit_length() - 2)
    bins = 1 << exponent
    start = [2 * index for index in range(bins) if 2 * index < top_k]
    adds = [((k - 2 * bins) // 2 % bins, k) for k in range(2 * bins, top_k, 2)]
    adds += [((k - 1) // 2 % bins, k) for k in range(1, top_k, 2)]
    folds = [
        (into - stride, into)
        for stride in (1 << step for step in range(exponent))
        for into in range(stride, bins, 2 * stride)
    ]
    return start, adds, folds


class _Rows:
    """fp32 rows of copy k for a chunk of tokens, with the mask of copies that count."""

    def __init__(self, grad: torch.Tensor, index: torch.Tensor, valid: torch.Tensor | None) -> None:
        self._grad = grad
        self._index = index
        self._valid = valid

    def load(self, k: int) -> torch.Tensor:
        """Return the rows, +0 where the copy is skipped."""
        rows = self._grad.index_select(0, self._index[k]).to(torch.float32)
        if self._valid is not None:
            rows.masked_fill_(~self._valid[k].unsqueeze(1), 0.0)
        return rows

    def add_to(self, total: torch.Tensor, k: int) -> None:
        """Add the rows to `total`, leaving it as it is (also -0) where the copy is skipped."""
        if self._valid is None:
            total.add_(self._grad.index_select(0, self._index[k]))
            return
        summed = total + self.load(k)
        torch.where(self._valid[k].unsqueeze(1), summed, total, out=total)


def _sum_a2(rows: _Rows, top_k: int) -> torch.Tensor:
    start, adds, folds = a2_order(top_k)
    bins = [rows.load(k) for k in start]
    for into, k in adds:
        rows.add_to(bins[into], k)
    for into, source in folds:
        bins[into].add_(bins[source])
    return bins[0]


def _sum_950(rows: _Rows, top_k: int) -> torch.Tensor:
    total = torch.zeros_like(rows.load(0))
    grouped = top_k - top_k % 4
    for k in range(0, grouped, 4):
        left = rows.load(k).add_(rows.load(k + 1))
        right = rows.load(k + 2).add_(rows.load(k + 3))
        total.add_(left.add_(right))
    for k in range(grouped, top_k):
        total.add_(rows.load(k))
    return total


def _valid_range(op: Call) -> tuple[int, int]:
    """Return the range of indices that count; others are skipped."""
    grad = op.grad_expanded_x
    if op.drop_pad_mode == DROP_PAD:
        return 0, grad.shape[0] * grad.shape[1]
    return 0, grad.shape[0]


def _check_indices(op: Call) -> bool:
    """Raise on an index that reads out of bounds on the device; True when some are skipped."""
    index = op.expanded_row_idx
    if index.numel() == 0:
        return False
    low, high = (int(bound) for bound in torch.aminmax(index))
    _, rows = _valid_range(op)
    on_950 = op.soc is Soc.ASCEND950
    if op.drop_pad_mode == DROP_PAD:
        bad = high >= rows or (low < -1 and not on_950)
        want = f"-1 or in [0, {rows}), the rows of grad_expanded_x"
    else:
        copies = index.numel()
        bad = (low < 0 or high >= copies) and not on_950
        want = f"indices in [0, {copies})"
    if bad:
        raise op.error("expanded_row_idx", got=f"indices from {low} to {high}", want=want)
    return low < 0 or high >= rows


def _compute(op: Call) -> Tensors:
    skips = _check_indices(op)
    hidden = op.grad_expanded_x.shape[-1]
    tokens = op.expanded_row_idx.numel() // op.top_k
    grad = op.grad_expanded_x.reshape(-1, hidden)
    output = op.new_output((tokens, hidden), grad.dtype, grad.device)
    if grad.shape[0] == 0:
        return [output.zero_()]
    index = op.expanded_row_idx.view(tokens, op.top_k).t().contiguous()
    valid = None
    if skips:
        valid = (index >= 0) & (index < grad.shape[0])
        index = torch.where(valid, index, 0)
    add_up = _sum_950 if op.soc is Soc.ASCEND950 else _sum_a2

    def work(chunk: slice) -> None:
        rows = _Rows(grad, index[:, chunk], None if valid is None else valid[:, chunk])
        output[chunk] = add_up(rows, op.top_k)

    run_parts(work, row_chunks(tokens, hidden))
    return [output]


def _naive(op: Call) -> Tensors:
    _check_indices(op)
    hidden = op.grad_expanded_x.shape[-1]
    grad = op.grad_expanded_x.reshape(-1, hidden).to(torch.float32)
    index = op.expanded_row_idx.tolist()
    tokens = len(index) // op.top_k
    low, high = _valid_range(op)
    output = torch.empty((tokens, hidden), dtype=op.grad_expanded_x.dtype)
    add_up = _naive_950 if op.soc is Soc.ASCEND950 else _naive_a2
    for token in range(tokens):
        copies = index[token * op.top_k : (token + 1) * op.top_k]
        output[token] = add_up([grad[at] if low <= at < high else None for at in copies], hidden)
    return [output]


def _naive_a2(rows: list[torch.Tensor | None], hidden: int) -> torch.Tensor:
    top_k = len(rows)
    exponent = 6 if top_k >= 128 else max(0, top_k.bit_length() - 2)
    bins = [torch.zeros(hidden)] * 2**exponent
    for index in range(len(bins)):
        if 2 * index < top_k and (row := rows[2 * index]) is not None:
            bins[index] = row
    for first, offset in ((2 * len(bins), 2 * len(bins)), (1, 1)):
        for k in range(first, top_k, 2):
            if (row := rows[k]) is not None:
                at = (k - offset) // 2 % len(bins)
                bins[at] = bins[at] + row
    stride = 1
    while stride < len(bins):
        for at in range(stride, len(bins), 2 * stride):
            bins[at - stride] = bins[at - stride] + bins[at]
        stride *= 2
    return bins[0]


def _naive_950(rows: list[torch.Tensor | None], hidden: int) -> torch.Tensor:
    zero = torch.zeros(hidden)
    filled = [zero if row is None else row for row in rows]
    total = zero
    while len(filled) >= 4:
        a, b, c, d, *filled = filled
        total = total + ((a + b) + (c + d))
    for row in filled:
        total = total + row
    return total


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

OPDEF = register(
    OpDef(
        ge_type="MoeInitRoutingV2Grad",
        inputs=(
            Input("grad_expanded_x", _FLOATS),
            Input("expanded_row_idx", (torch.int32,)),
        ),
        outputs=(Output("grad_x"),),
        attrs=(
            Attr("top_k", "Int", REQUIRED),
            Attr("drop_pad_mode", "Int", 0),
            Attr("active_num", "Int", 0),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        checked_outputs=("grad_x",),
        no_gradient="it is a gradient itself; a second derivative is not defined",
        forms=(
            Form("all rows", {"grad_expanded_x": "R H", "expanded_row_idx": "T*K"}, {"top_k": "K"}),
            Form(
                "active_num",
                {"grad_expanded_x": "A H", "expanded_row_idx": "T*K"},
                {"top_k": "K", "active_num": "A"},
            ),
            Form(
                "drop/pad",
                {"grad_expanded_x": "E C H", "expanded_row_idx": "T*K"},
                {"top_k": "K", "drop_pad_mode": 1},
            ),
        ),
        function="moe_init_routing_grad",
        compute=_compute,
        naive=_naive,
        doc="ops-transformer moe/moe_init_routing_v2_grad: infershape, tiling, membase and arch35 "
        "kernels",
    )
)
