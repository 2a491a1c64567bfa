"""MoeInitRoutingV2Grad for every K from 1 to 200, on values where another order shows.

The order of A2 and A3 is written down here a second time, from its four steps, with scalars of
numpy's float32; that of Ascend 950 as sums of four. The expressions for small K stand, spelt out,
in `test_moe_init_routing.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_graph import Soc, ops
from tests.ops.comparing import assert_same_bits, order_sensitive

HIDDEN = 24


def _four_steps(rows: list[np.ndarray]) -> np.ndarray:
    """A2 and A3: even copies start the bins, even ones go on, odd ones follow, bins fold."""
    k = len(rows)
    exponent = 6 if k >= 128 else max(0, math.floor(math.log2(k)) - 1)
    bins = 2**exponent
    total = [np.zeros(HIDDEN, dtype=np.float32) for _ in range(bins)]
    for j in range(bins):
        if 2 * j < k:
            total[j] = rows[2 * j].copy()
    for t in range(2 * bins, k, 2):
        total[(t - 2 * bins) // 2 % bins] += rows[t]
    for t in range(1, k, 2):
        total[(t - 1) // 2 % bins] += rows[t]
    for step in range(exponent):
        stride = 2**step
        for j in range(stride, bins, 2 * stride):
            total[j - stride] += total[j]
    return total[0]


def _fours(rows: list[np.ndarray]) -> np.ndarray:
    """Ascend 950: from zero, sums of four; what is left one by one."""
    total = np.zeros(HIDDEN, dtype=np.float32)
    whole = len(rows) // 4 * 4
    for t in range(0, whole, 4):
        total = total + ((rows[t] + rows[t + 1]) + (rows[t + 2] + rows[t + 3]))
    for t in range(whole, len(rows)):
        total = total + rows[t]
    return total


def _sequential(rows: list[np.ndarray]) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.parametrize("top_k", range(1, 201))
def test_every_k_sums_in_the_order_of_its_product(top_k: int) -> None:
    grad = order_sensitive((2 * top_k, HIDDEN), seed=top_k, dtype=torch.float32)
    row_idx = torch.randperm(2 * top_k).to(torch.int32)
    per_token = [
        [grad[row].numpy() for row in row_idx[i * top_k : (i + 1) * top_k]] for i in range(2)
    ]
    orders = {Soc.A2: _four_steps, Soc.A3: _four_steps, Soc.ASCEND950: _fours}
    wants = {}
    for soc, order in orders.items():
        wants[soc] = torch.from_numpy(np.stack([order(rows) for rows in per_token]))
        with ops.use_product(soc):
            assert_same_bits(ops.moe_init_routing_grad(grad, row_idx, top_k), wants[soc])
    if top_k >= 5:
        # The values tell orders apart: the two products (whose orders for 8 are the same), and both
        # from one after another.
        sequential = torch.from_numpy(np.stack([_sequential(rows) for rows in per_token]))
        assert torch.equal(wants[Soc.A2], wants[Soc.ASCEND950]) == (top_k == 8)
        assert not torch.equal(wants[Soc.A2], sequential)
        assert not torch.equal(wants[Soc.ASCEND950], sequential)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("top_k", [2, 8, 13, 130])
def test_sixteen_bits_are_rounded_once(top_k: int, dtype: torch.dtype) -> None:
    grad = order_sensitive((top_k, HIDDEN), seed=top_k, dtype=dtype)
    row_idx = torch.randperm(top_k).to(torch.int32)
    rows = [grad[row].float().numpy() for row in row_idx]
    want = torch.from_numpy(_four_steps(rows)).to(dtype).unsqueeze(0)
    assert_same_bits(ops.moe_init_routing_grad(grad, row_idx, top_k), want)
