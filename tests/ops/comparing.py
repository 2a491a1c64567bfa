"""Comparisons and inputs that the op tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops import find
from moe_graph.ops.torch_binding import specs_of

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def assert_same_bits(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Fail unless both are None, or equal bit for bit (-0 differs from +0, NaN equals NaN)."""
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.is_floating_point():
        nan = torch.isnan(got)
        assert torch.equal(nan, torch.isnan(want))
        bits = _BITS[got.element_size()]
        got = torch.where(nan, 0, got).contiguous().view(bits)
        want = torch.where(nan, 0, want).contiguous().view(bits)
    assert torch.equal(got, want)


def kernel_and_reference(
    ge_type: str, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc = Soc.A2
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Check the inputs, run both, and check shapes and dtypes of the kernel against the rule."""
    opdef = find(ge_type)
    assert opdef is not None
    complete = opdef.bind_attrs(attrs)
    specs = opdef.infer(specs_of(inputs), complete, soc)
    got = opdef.kernel(inputs, complete, soc)
    for spec, tensor in zip(specs, got, strict=True):
        assert (spec is None) == (tensor is None)
        if spec is not None and tensor is not None:
            assert spec.shape == tuple(tensor.shape)
            assert spec.dtype == tensor.dtype
    return got, opdef.reference(inputs, complete, soc)


def order_sensitive(shape: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of widely different size and sign, whose sums depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randn(*shape, generator=generator)
    exponent = torch.randint(-6, 7, tuple(shape), generator=generator)
    return (mantissa * torch.pow(2.0, exponent)).to(dtype)


def routing(tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """Return ids ``[tokens, top_k]`` int32; rows may repeat an expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    return ids.to(torch.int32)
