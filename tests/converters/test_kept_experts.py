"""What a kept layer holds, histc and grouped products, through TorchAir and the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

import moe_graph
from moe_graph.converters.kept_experts import kept_experts_decompositions

aten = torch.ops.aten
EXPERTS, HIDDEN, INNER = 5, 16, 8


def histc(*arguments: Any) -> Any:
    return kept_experts_decompositions()[aten.histc.default](*arguments)


@pytest.mark.parametrize("bins", [1, 4, 7])
@pytest.mark.parametrize(("low", "high"), [(0, 6), (-1.5, 2.5), (1, 1.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histc_with_a_range(bins: int, low: float, high: float, dtype: torch.dtype) -> None:
    edges = torch.tensor([low, high, low - 1, high + 1, 0.0, 3.0], dtype=dtype)
    x = torch.cat([edges, torch.randn(200, dtype=dtype) * 2]).view(2, -1)
    assert torch.equal(histc(x, bins, low, high), torch.histc(x, bins, low, high))


def test_histc_of_ids_counts_them() -> None:
    ids = torch.randint(0, EXPERTS, (40,)).float()
    got = histc(ids, EXPERTS, 0, EXPERTS - 1)
    assert torch.equal(got, torch.bincount(ids.long(), minlength=EXPERTS).float())


def test_histc_whose_range_the_data_decide_is_left() -> None:
    assert histc(torch.randn(8), 4) is NotImplemented


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=moe_graph.npu_backend(), dynamic=False)


def test_histc_on_the_npu() -> None:
    ids = torch.randint(0, EXPERTS, (40,)).int().float()
    got = compiled(lambda x: torch.histc(x, EXPERTS, 0, EXPERTS - 1))(ids.npu())
    assert torch.equal(got.cpu(), torch.histc(ids, EXPERTS, 0, EXPERTS - 1))


@pytest.mark.parametrize("counts", [[4, 0, 3, 2, 1], [0, 0, 10, 0, 0]], ids=str)
def test_transformers_grouped_products_and_their_gradients(counts: list[int]) -> None:
    def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)

    assert moe  # registers the ops
    ends = torch.tensor(counts).cumsum(0).int()
    rows, weights = torch.randn(10, HIDDEN), torch.randn(EXPERTS, INNER, HIDDEN).transpose(1, 2)
    want = [t.clone().requires_grad_() for t in (rows, weights)]
    got = [t.npu().detach().requires_grad_() for t in (rows, weights)]
    expected = product(*want, ends)
    result = compiled(product)(*got, ends.npu())
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    result.square().sum().backward()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", [[4, 0, 3, 2, 1], [0, 0, 10, 0, 0]], ids=str)
def test_products_of_pytorch(counts: list[int]) -> None:
    """By definition of ``torch._grouped_mm``: each group's rows times its matrix."""
    ends = torch.tensor(counts).cumsum(0).int()
    rows, weights = torch.randn(10, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    decomposed = kept_experts_decompositions()[aten._grouped_mm.default]
    parts = rows.split(counts)
    want = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    torch.testing.assert_close(decomposed(rows, weights, ends), want)
    others = torch.randn(10, INNER).split(counts)
    inner = torch.stack([left.t() @ right for left, right in zip(parts, others, strict=True)])
    torch.testing.assert_close(decomposed(rows.t(), torch.cat(others), ends), inner)
    assert decomposed(rows, weights, None) is NotImplemented
    assert decomposed(rows, weights, ends, out_dtype=torch.float64) is NotImplemented
