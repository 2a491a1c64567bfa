"""Grouped products of lists and of int8 in graphs, also by TorchAir's own converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
import torchair

from moe_graph import ops
from moe_graph.converters import register_converters

ENDS = [2, 2, 7]


@pytest.fixture(autouse=True)
def _converters() -> None:
    register_converters()
    torch._dynamo.reset()


def _ours(x: Any, weight: Any, scale: Any, per_token_scale: Any, group_list: Any) -> Any:
    (y,) = torch.ops.moe_graph.grouped_matmul(
        [x],
        [weight],
        [],
        [scale],
        [],
        [],
        [],
        group_list,
        per_token_scale,
        split_item=3,
        group_type=0,
    )
    return y


def _torch_npu(x: Any, weight: Any, scale: Any, per_token_scale: Any, group_list: Any) -> Any:
    (y,) = torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        scale=[scale],
        per_token_scale=[per_token_scale],
        group_list=group_list,
        split_item=3,
        group_type=0,
        group_list_type=0,
        output_dtype=torch.float16,
    )
    return y


@pytest.mark.parametrize("product", [_ours, _torch_npu])
def test_int8_rows_are_multiplied_in_a_graph(product: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (7, 64), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (3, 64, 16), generator=generator, dtype=torch.int8)
    scale = torch.rand(3, 16, generator=generator) * 1e-3
    per_token_scale = torch.rand(7, generator=generator)
    compiled = torch.compile(product, backend=torchair.get_npu_backend(), fullgraph=True)
    inputs = (x, weight, scale, per_token_scale, torch.tensor(ENDS))
    y = compiled(*(tensor.npu() for tensor in inputs)).cpu()
    want = torch.cat(
        [
            (x[begin:end].double() @ weight[group].double()) * scale[group].double()
            for group, (begin, end) in enumerate(zip([0, *ENDS], ENDS, strict=False))
        ]
    )
    want = want * per_token_scale[:, None].double()
    assert y.dtype is torch.float16
    torch.testing.assert_close(y.double(), want, rtol=2**-10, atol=1e-6)


def test_a_list_of_weights_with_one_joined_y_is_a_list_of_one() -> None:
    x, weights = torch.randn(4, 8), [torch.randn(8, 3), torch.randn(8, 3)]

    def product(x: Any, first: Any, second: Any, group_list: Any) -> Any:
        return ops.grouped_matmul(x, [first, second], group_list=group_list)

    compiled = torch.compile(product, backend=torchair.get_npu_backend(), fullgraph=True)
    y = compiled(x.npu(), *(weight.npu() for weight in weights), torch.tensor([1, 4]).npu()).cpu()
    torch.testing.assert_close(y, torch.cat([x[:1] @ weights[0], x[1:] @ weights[1]]))


def test_a_product_that_is_not_computed_says_so_in_a_graph() -> None:
    compiled = torch.compile(_ours, backend=torchair.get_npu_backend(), fullgraph=True)
    x, weight = torch.zeros(2, 64, dtype=torch.int8), torch.zeros(1, 64, 16, dtype=torch.int8)
    scale = torch.ones(1, 16, dtype=torch.float16)
    with pytest.raises(Exception, match="scale: got float16, want"):
        compiled(x.npu(), weight.npu(), scale.npu(), None, torch.tensor([2]).npu())
