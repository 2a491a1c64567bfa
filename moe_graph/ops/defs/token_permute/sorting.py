"""Bringing token copies into the order of their indices, which the permuting ops share.

Copy ``c = i * topK + k`` is choice k of token i. ``sorted_indices[c]`` is its place in the stable
ascending sort of all indices.
"""

from __future__ import annotations

import torch

from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown, mul
from moe_graph.ops.limit import attribute, dim
from moe_graph.ops.opdef import Call, Limit, TensorSpec

MAX_TOP_K = 512
END_OF_EXACT = 16777215
"""Indices are sorted as fp32 on the device; the pages want them, and their number, below this."""


def index_dims(op: Call) -> tuple[Dim, Dim]:
    """Return (T, topK) as `indices` has them; topK is 1 for indices in one dimension.

    Raises:
        OpError: indices have another number of dimensions.
    """
    spec: TensorSpec = op.indices
    if not spec.rank_known:
        return UNKNOWN, UNKNOWN
    if len(spec.shape) not in (1, 2):
        raise op.error("indices", got=spec, want="1 or 2 dimensions")
    return (*spec.shape, 1)[:2]


def copies_of(op: Call) -> Dim:
    """Return T * topK.

    The public rule multiplies unknown sizes, -1, as they are, and takes a product that is not
    positive for an unknown size.
    """
    tokens, top_k = index_dims(op)
    if not op.upstream:
        return mul(tokens, top_k)
    if not op.indices.rank_known:
        return UNKNOWN
    product = tokens * top_k
    return product if not isinstance(product, int) or product > 0 else UNKNOWN


def permuted(op: Call, rows: Dim) -> TensorSpec:
    """Return the spec of `rows` permuted tokens.

    The public rule leaves the number of tokens as it is where the number of copies is unknown.
    """
    tokens: TensorSpec = op.tokens
    if not tokens.rank_known or not tokens.shape or (op.upstream and is_unknown(rows)):
        return tokens
    return TensorSpec((rows, *tokens.shape[1:]), tokens.dtype)


def check_permutes(op: Call) -> None:
    """Check what the tiling of a permuting op checks.

    Raises:
        OpError: padded_mode, or the sizes of tokens and indices do not fit.
    """
    refuse_padded_mode(op)
    tokens: TensorSpec = op.tokens
    if tokens.rank_known and len(tokens.shape) < 2:
        raise op.error("tokens", got=tokens, want="2 dimensions or more")
    if tokens.rank_known:
        op.expect_equal("indices", index_dims(op)[0], tokens.shape[0], "dim 0")


def size(op: Call, argument: str, index: int) -> Dim:
    """Return a size as most GE rules of this family read it: off a tensor of any rank.

    It is unknown where there is no such dimension. Ranks are left to the tiling.
    """
    return dim(argument, index)(op)


def refuse_padded_mode(op: Call) -> None:
    """Raise for padded_mode, which no product has.

    Raises:
        OpError: it is set.
    """
    if op.padded_mode:
        raise op.error("padded_mode", got=True, want=False)


def check_whole_tokens(op: Call, copies: Dim) -> None:
    """Raise unless `copies`, those of sorted_indices, are a multiple of num_topk.

    Raises:
        OpError: they are known not to be.
    """
    if isinstance(copies, int) and copies > 0 and copies % op.num_topk:
        raise op.error(
            "sorted_indices", got=f"{copies} indices", want=f"a multiple of {op.num_topk}"
        )


def permuting_limits(page: str) -> tuple[Limit, ...]:
    """Return the limits of a permuting op; `page` is where they stand."""
    return (
        Limit("indices", "topK", lambda op: index_dims(op)[1], source=page, low=1, high=MAX_TOP_K),
        Limit(
            "indices",
            "T * topK",
            lambda op: mul(*index_dims(op)),
            source=page,
            high=END_OF_EXACT - 1,
        ),
    )


def probs_limit(page: str) -> Limit:
    """Return the limit of topK where it is dim 1 of the probs."""
    return Limit("probs", "topK", dim("probs", 1), source=page, high=MAX_TOP_K)


def top_k_limit(attr: str, page: str) -> Limit:
    """Return the limit of topK where it is attribute `attr`."""
    return Limit(attr, "topK", attribute(attr), source=page, low=1, high=MAX_TOP_K)


def order_of(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the copies in sorted order, int64, and the place of each copy, int32."""
    order = torch.argsort(indices.reshape(-1), stable=True)
    place = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return order, torch.empty_like(place).scatter_(0, order, place)


def top_k_of(indices: torch.Tensor) -> int:
    """Return topK of real indices, 1 where there are none."""
    return max(indices.shape[1], 1) if indices.dim() == 2 else 1


def gather_tokens(op: Call, copies: torch.Tensor) -> torch.Tensor:
    """Return the token row of each of `copies`, which are overwritten, as output 0."""
    tokens: torch.Tensor = op.tokens
    source = copies.div_(top_k_of(op.indices), rounding_mode="floor")
    shape = (copies.shape[0], *tokens.shape[1:])
    output = op.new_output(shape, tokens.dtype, tokens.device)
    width = tokens.shape[1:].numel()
    table, rows = tokens.reshape(tokens.shape[0], width), output.view(copies.shape[0], width)
    gather_rows(table, source, rows)
    return output


def naive_order(indices: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return what :func:`order_of` returns, as the definition reads."""
    ids = indices.reshape(-1).tolist()
    order = sorted(range(len(ids)), key=lambda copy: ids[copy])
    place = torch.empty(len(ids), dtype=torch.int32)
    for at, copy in enumerate(order):
        place[copy] = at
    return order, place
