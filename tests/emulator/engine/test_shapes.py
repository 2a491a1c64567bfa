"""Dynamic shapes, empty tensors and scalars, through TorchAir, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from through_torchair import assert_same, check, compiled, to_npu
from torch import Tensor


def attention_block(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() == 0
    scores = (q @ q.transpose(-1, -2)).masked_fill(mask, -torch.inf).softmax(-1)
    return (scores @ q).transpose(1, 2).reshape(x.shape)


def router(x: Tensor, w: Tensor) -> list[Tensor]:
    values, ids = (x.flatten(0, 1) @ w).softmax(-1).topk(2)
    weights = values / values.sum(-1, keepdim=True)
    mask = torch.zeros_like(x.flatten(0, 1) @ w).scatter(1, ids, 1.0)
    return [weights, ids, mask, mask.sum(0), mask.cumsum(0)]


def shapes(x: Tensor, w: Tensor) -> list[Any]:
    flat = x.flatten(0, 1)
    rows = flat.shape[0]
    return [
        torch.arange(rows, device=x.device),
        torch.cat([flat, flat], 0),
        flat.new_zeros(rows, 3),
        flat[: rows // 2],
        flat[None].expand(2, rows, x.shape[2]),
        F.pad(flat, (0, 1)),
        flat.repeat(2, 1),
        x.sum() / rows,
    ]


def norms(x: Tensor, w: Tensor) -> list[Tensor]:
    rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [rms * w[0], F.layer_norm(x, (8,), w[0]), x.std(1)]


FUNCTIONS: tuple[Callable[..., Any], ...] = (attention_block, router, shapes, norms)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_dynamic_graph_serves_many_sizes(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    runs = [(torch.randn(b, t, 8), weight) for b, t in ((2, 3), (3, 5), (2, 9), (4, 7))]
    types = check(function, *runs, dynamic=True)
    assert types["NetOutput"] == 1, "a size was compiled anew"


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_tokens(dynamic: bool) -> None:
    def layer(x: Tensor, w: Tensor, i: Tensor) -> list[Tensor]:
        y = F.silu(x @ w) * 2
        return [
            y, y.sum(0), y.sum(-1), y.softmax(-1), y[i], torch.cat([y, y]), y.transpose(0, 1),
            w.index_add(0, i, y), y.reshape(-1, 2, 2), y.cumsum(0), y.to(torch.bfloat16),
        ]  # fmt: skip

    torch.manual_seed(0)
    empty = (torch.randn(0, 4), torch.randn(4, 4), torch.zeros(0, dtype=torch.int64))
    some = (torch.randn(3, 4), torch.randn(4, 4), torch.tensor([0, 2, 1]))
    check(layer, *([empty] if not dynamic else [some, empty]), dynamic=dynamic)


def test_scalars() -> None:
    def function(x: Tensor, i: Tensor) -> list[Tensor]:
        return [x + 1, x * i, x.reshape(1), x.sum(), x.expand(2, 3), -x, x > 0, i // 2]

    check(function, (torch.tensor(1.5), torch.tensor(3)))


def test_a_data_dependent_size_is_read_at_run_time() -> None:
    program = compiled(lambda x, n: x[: n.shape[0]] * 2, dynamic=True)
    x = torch.arange(10.0)
    for size in (3, 7):
        n = torch.zeros(size)
        assert_same(program(*to_npu((x, n))), x[:size] * 2)
