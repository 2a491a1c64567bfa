"""Gradient of the torch op of MoeTokenPermuteWithRoutingMap, in ops that TorchAir can lower.

It is MoeTokenPermuteWithRoutingMapGrad, as in torch_npu. That op takes the number of tokens as an
attribute, a constant of a graph. Where that number is a symbol, which it can be with drop and pad,
rows and probs are added up by their tokens instead. (Without drop and pad `num_out_tokens` is a
constant that fixes the number of tokens.)
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.opdef import Autograd


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(op.routing_map, outputs[2])
    ctx.drop_and_pad = op.drop_and_pad
    ctx.has_probs = op.probs is not None


def _backward(
    ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor, _: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    routing_map, sorted_indices = ctx.saved_tensors
    experts, tokens = routing_map.shape
    wanted = grad_probs if ctx.has_probs else None
    if isinstance(tokens, torch.SymInt) and ctx.drop_and_pad:
        return _of_any_token_count(grad_tokens, wanted, sorted_indices, experts, tokens)
    if isinstance(tokens, int) and tokens == 0:
        # The gradient op refuses to have no tokens.
        return {
            "tokens": grad_tokens.new_zeros((0, grad_tokens.shape[1])),
            "probs": None if wanted is None else wanted.new_zeros((experts, 0)),
        }
    of_tokens, of_probs = torch.ops.moe_graph.moe_token_permute_with_routing_map_grad(
        grad_tokens,
        wanted,
        sorted_indices,
        routing_map.t(),
        int(experts),
        int(tokens),
        ctx.drop_and_pad,
    )
    return {"tokens": of_tokens, "probs": None if wanted is None else of_probs.t()}


def _of_any_token_count(
    grad_tokens: torch.Tensor,
    grad_probs: torch.Tensor | None,
    token_of_row: torch.Tensor,
    experts: int,
    tokens: torch.SymInt,
) -> dict[str, torch.Tensor | None]:
    rows, hidden = grad_tokens.shape
    index = token_of_row.to(torch.int64)
    wide = torch.zeros((tokens, hidden), dtype=torch.float32, device=grad_tokens.device)
    wide = wide.scatter_add(
        0, index.unsqueeze(1).expand(rows, hidden), grad_tokens.to(torch.float32)
    )
    of_probs = None
    if grad_probs is not None:
        capacity = rows // experts
        zeros = torch.zeros((experts, tokens), dtype=grad_probs.dtype, device=index.device)
        of_probs = zeros.scatter_add(
            1, index.view(experts, capacity), grad_probs.view(experts, capacity)
        )
    return {"tokens": wide.to(grad_tokens.dtype), "probs": of_probs}


AUTOGRAD = Autograd(_save, _backward)
