"""The gradient of permuted tokens, in ops that give the right shape on every product.

GE's infershape of MoeTokenPermuteGrad divides the number of rows by topK, which is T only where no
row was left out. Where some may be, others give the same sum of the same rows:

- A2, A3: MoeTokenUnpermute with probs of 1, whose shape rule reads T off the probs and which skips
  places without a row;
- Ascend 950: MoeInitRoutingV2Grad, where ``active_num`` is the number of rows.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.product import current_product


def gradient_of_tokens(
    grad: torch.Tensor, sorted_indices: torch.Tensor, top_k: int, *, keeps_all: bool
) -> torch.Tensor:
    """Return ``[T, H]``, the sum of the rows of each token; `keeps_all`: no row was left out."""
    ops = torch.ops.moe_graph
    result: torch.Tensor
    if keeps_all:
        result = ops.moe_token_permute_grad(grad, sorted_indices, top_k)
        return result
    tokens = sorted_indices.shape[0] // top_k
    if not _is_on_950():
        result = ops.moe_token_unpermute(grad, sorted_indices, grad.new_ones((tokens, top_k)))
        return result
    active_num = int(grad.shape[0])  # an attribute: a dynamic number of rows becomes a constant
    if active_num == 0:
        return grad.new_zeros((tokens, grad.shape[1]))
    result = ops.moe_init_routing_v2_grad(grad, sorted_indices, top_k, 0, active_num)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_on_950() -> bool:
    # Dynamo cannot read a context variable; what it takes for constant is the product at that time.
    return current_product() is Soc.ASCEND950
