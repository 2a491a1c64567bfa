"""Routing maps and what the ops with a routing map take, for their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_graph import ops

MIXED = (torch.bfloat16, torch.float32)


def map_of(tokens: int, experts: int, top_k: int, *, seed: int, exact: bool = True) -> torch.Tensor:
    """Return ``[tokens, experts]`` bool with `top_k` experts per token, or up to as many."""
    generator = torch.Generator().manual_seed(seed)
    routing_map = torch.zeros((tokens, experts), dtype=torch.bool)
    for token in range(tokens):
        count = top_k
        if not exact:
            count = int(torch.randint(0, top_k + 1, (), generator=generator))
        routing_map[token, torch.randperm(experts, generator=generator)[:count]] = True
    return routing_map


def permuted_indices(routing_map: torch.Tensor, num_out_tokens: int, pad: bool) -> torch.Tensor:
    """Return the ``sorted_indices`` that the permutation gives for a map."""
    tokens = torch.zeros((routing_map.shape[0], 1))
    return ops.moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=num_out_tokens, drop_and_pad=pad
    )[2]


def error_of(function: Callable[..., Any], **arguments: Any) -> ops.OpError:
    """Call `function`, which must raise an OpError that says all, and return that."""
    with pytest.raises(ops.OpError) as caught:
        function(**arguments)
    assert caught.value.op.startswith("MoeToken")
    assert caught.value.got
    assert caught.value.want
    return caught.value
