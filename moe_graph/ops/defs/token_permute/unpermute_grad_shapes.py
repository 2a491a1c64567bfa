"""The shape rule that the gradients of the un-permuting ops share."""

from __future__ import annotations

from moe_graph.ops.dims import Dim, known_less, mul
from moe_graph.ops.opdef import Call, Specs, TensorSpec


def unpermute_grad_shapes(op: Call) -> Specs:
    """Return ``[copies, H]`` and the spec of the probs.

    The public rule reads no size where the rank of permuted_tokens is unknown and leaves the first
    output without dimensions then; here its shape follows from the other inputs all the same.
    """
    grad = op.unpermuted_tokens_grad
    probs = None if op.probs is None else TensorSpec(op.probs.shape, op.probs.dtype)
    rows = op.permuted_tokens
    if op.upstream and rows is not None and not rows.rank_known:
        return [TensorSpec((), grad.dtype), probs]
    if rows is not None:
        op.dims("permuted_tokens", rank=2)
    _, hidden = op.dims("unpermuted_tokens_grad", rank=2)
    (copies,) = op.dims("sorted_indices", rank=1)
    return [TensorSpec((copies, hidden), grad.dtype), probs]


def check_unpermute_grad(op: Call, top_k: Dim = 1) -> None:
    """Check what must fit together when a gradient of an un-permuting op runs.

    Args:
        op: the call.
        top_k: topK where there are no probs.

    Raises:
        OpError: sizes do not, or permuted_tokens is needed and absent.
    """
    tokens, hidden = op.dims("unpermuted_tokens_grad", rank=2)
    if op.permuted_tokens is not None:
        op.expect_equal("permuted_tokens", op.dims("permuted_tokens", rank=2)[1], hidden, "dim 1")
    (copies,) = op.dims("sorted_indices", rank=1)
    if op.probs is None:
        wanted = mul(tokens, top_k)
        if known_less(copies, wanted):
            raise op.error("sorted_indices", got=f"{copies} indices", want=f"{wanted}, T * topK")
        return
    if op.permuted_tokens is None:
        raise op.error("permuted_tokens", got="nothing", want="a tensor, since probs is given")
    probs_tokens, top_k = op.dims("probs", rank=2)
    op.expect_equal("probs", probs_tokens, tokens, "dim 0")
    op.expect_equal("sorted_indices", copies, mul(tokens, top_k), "dim 0")
