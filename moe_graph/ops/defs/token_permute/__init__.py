"""MoeTokenPermute, MoeTokenUnpermute and their kin: one module per GE op."""

from __future__ import annotations

from moe_graph.ops.defs.token_permute import (
    moe_token_permute,
    moe_token_permute_grad,
    moe_token_permute_with_ep,
    moe_token_permute_with_ep_grad,
    moe_token_unpermute,
    moe_token_unpermute_grad,
    moe_token_unpermute_with_ep,
    moe_token_unpermute_with_ep_grad,
)

__all__ = [
    "moe_token_permute",
    "moe_token_permute_grad",
    "moe_token_permute_with_ep",
    "moe_token_permute_with_ep_grad",
    "moe_token_unpermute",
    "moe_token_unpermute_grad",
    "moe_token_unpermute_with_ep",
    "moe_token_unpermute_with_ep_grad",
]
