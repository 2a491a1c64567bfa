"""What the ops with a routing map share: the map itself, and sums of rows.

A routing map says with 1 or true which experts a token goes to. The copies (token, expert) that it
lists are numbered in expert order: expert by expert, tokens ascending. That number is the row of a
copy among the permuted tokens.

Without drop and pad every token has ``topK`` slots; ``sorted_indices[t * topK + j]`` is the row of
the j-th copy of token t, -1 where a token has fewer. With drop and pad every expert has
``capacity`` rows, and ``sorted_indices[row]`` is the token of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import Dim, floordiv
from moe_graph.ops.opdef import Call

UNPERMUTE_ROWS = (torch.bfloat16,) * 4 + (torch.float16,) * 2 + (torch.float32,) * 2
UNPERMUTE_PROBS = (
    (torch.bfloat16,) * 2 + (torch.float32,) * 2 + (torch.float16,) * 2 + (torch.float32,) * 2
)
MAPS = (torch.bool, torch.int8) * 4
"""Columns of rows, probs and maps that ops of the family have in common."""

MAX_TOP_K = 512
MAX_SORTED = (1 << 24) - 2
"""Indices are sorted as fp32 on the device; the pages want fewer than 16777215."""


def whole(total: Dim, parts: Dim) -> Dim:
    """Return ``total // parts``, 0 for no parts."""
    return 0 if isinstance(parts, int) and parts == 0 else floordiv(total, parts)


def mask_of(op: Call, argument: str) -> torch.Tensor:
    """Return the routing map as bool.

    Raises:
        OpError: it has a value that is neither 0 nor 1.
    """
    routing_map: torch.Tensor = getattr(op, argument)
    if routing_map.dtype is torch.bool:
        return routing_map
    if routing_map.numel():
        low, high = (int(bound) for bound in torch.aminmax(routing_map))
        if low < 0 or high > 1:
            raise op.error(argument, got=f"values from {low} to {high}", want="0 or 1")
    return routing_map.to(torch.bool)


def copies_of(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Return the copies (token, expert) of a map ``[T, E]`` in expert order, by the definition."""
    tokens, experts = mask.shape
    listed = mask.tolist()
    return [(t, e) for e in range(experts) for t in range(tokens) if listed[t][e]]


def check_whole(op: Call, argument: str, count: int, parts: int, of: str) -> None:
    """Raise unless `count`, the size of `argument`, is a multiple of `parts`, named `of`.

    Raises:
        OpError: it is not.
    """
    if count % parts if parts else count:
        raise op.error(argument, got=f"{count} rows", want=f"a multiple of {of} = {parts}")


def places_of_copies(mask: torch.Tensor) -> torch.Tensor:
    """Return ``t * E + e`` of the copies of a map ``[E, T]``, in expert order."""
    experts, tokens = mask.shape
    expert = mask.reshape(-1).nonzero().view(-1)
    token = torch.remainder(expert, max(tokens, 1))
    expert.div_(max(tokens, 1), rounding_mode="floor")
    return token.mul_(experts).add_(expert)


def places_of_rows(token_of_row: torch.Tensor, experts: int) -> torch.Tensor:
    """Return ``t * E + e`` of the rows with drop and pad."""
    token = token_of_row.view(max(experts, 1), -1).to(torch.int64)
    expert = torch.arange(token.shape[0], device=token.device).unsqueeze(1)
    return token.mul_(experts).add_(expert).view(-1)


def spread(of_rows: torch.Tensor, places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return ``[T, E]`` with each of `of_rows` at its place, else 0."""
    result = of_rows.new_zeros(list(shape))
    result.view(-1)[places] = of_rows[: places.shape[0]]
    return result


def rows_of_tokens(token_of_row: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return ``[n, tokens]``: the rows of each token, ascending, then -1."""
    counts = torch.bincount(token_of_row, minlength=tokens)
    most = int(counts.max()) if counts.numel() else 0
    token, row = _by_token(token_of_row)
    if most * tokens == row.shape[0]:
        return row.view(tokens, most).t().contiguous()
    first = (counts.cumsum(0) - counts).to(torch.int32)
    rank = torch.arange(row.shape[0], dtype=torch.int32, device=row.device)
    rank -= first.index_select(0, token)
    rows = torch.full((most, tokens), -1, dtype=torch.int32, device=row.device)
    rows[rank, token] = row
    return rows


def _by_token(token_of_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    token, row = torch.sort(token_of_row, stable=True)
    return token, row.to(torch.int32)


def sum_rows(
    source: torch.Tensor,
    rows: torch.Tensor,
    weight_of_row: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Write the sum of the rows of each token to `output`, in fp32 with one final rounding.

    Args:
        source: ``[R, H]``.
        rows: ``[n, T]``, added from the first to the last; -1 is skipped.
        weight_of_row: ``[R]``, multiplied before the addition; None for 1.
        output: ``[T, H]``.
    """
    tokens, hidden = output.shape
    none_missing = bool((rows >= 0).all())

    def work(chunk: slice) -> None:
        y = output[chunk]
        total = y if y.dtype is torch.float32 else torch.empty_like(y, dtype=torch.float32)
        total.zero_()
        of_tokens = rows[:, chunk]
        if not none_missing:
            of_tokens = of_tokens[(of_tokens >= 0).any(1)]
        for of_chunk in of_tokens:
            there = None if none_missing else (of_chunk >= 0).nonzero().view(-1)
            row = of_chunk if there is None else of_chunk.index_select(0, there)
            part = source.index_select(0, row).to(torch.float32)
            if weight_of_row is not None:
                part.mul_(weight_of_row.index_select(0, row).to(torch.float32).unsqueeze(1))
            if there is None:
                total.add_(part)
            else:
                total.index_add_(0, there, part)
        if total is not y:
            y.copy_(total)

    run_parts(work, row_chunks(tokens, hidden))
