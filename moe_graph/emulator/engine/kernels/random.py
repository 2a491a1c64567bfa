"""Random ops. Reproducible from (seed, offset); the bits are not those of the device."""

from __future__ import annotations

import torch

from moe_graph.emulator.engine.errors import KernelError
from moe_graph.emulator.engine.registry import Int, Ints, Number, Tensor, ge_op

_MASK_64 = (1 << 64) - 1
_MASK_ALIGNMENT = 128  # bits; the length of a dropout mask is a multiple of this


def _generator(*state: int) -> torch.Generator:
    """Return a generator seeded by a hash of the state, so that nearby offsets are unrelated."""
    mixed = 0
    for word in state:
        mixed = ((mixed ^ word) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK_64
        mixed ^= mixed >> 29
    return torch.Generator().manual_seed(mixed & (_MASK_64 >> 1))


def _uniform(shape: list[int], *state: int) -> Tensor:
    return torch.rand(shape, generator=_generator(*state), dtype=torch.float32)


@ge_op("StatelessRandomUniformV2")
def random_uniform(
    shape: Ints, key: Ints, counter: Ints, alg: Int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform in [0, 1)."""
    return _uniform(shape, *key, *counter).to(dtype)


@ge_op("StatelessRandomNormalV2")
def random_normal(
    shape: Ints, key: Ints, counter: Ints, alg: Int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = _generator(*key, *counter)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@ge_op("StatelessBernoulli")
def bernoulli(
    shape: Ints,
    prob: Tensor,
    seed: Int,
    offset: Int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """1 with probability `prob` (broadcast to `shape`), else 0."""
    return (_uniform(shape, seed, offset) < prob.float()).to(dtype)


@ge_op("StatelessRandperm")
def random_permutation(
    n: Int, seed: Int, offset: Int, *, layout: int = 0, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.randperm(n, generator=_generator(seed, offset)).to(dtype)


@ge_op("StatelessDropOutGenMask")
def dropout_mask(shape: Ints, prob: Number, seed: Int, seed1: Int, offset: Ints | None) -> Tensor:
    """Bits, 1 with probability `prob`, packed into uint8, lowest bit first."""
    count = torch.Size(shape).numel()
    length = -(-count // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    bits = _uniform([length], seed, seed1, *(offset or [])) < float(prob)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.int32)
    return (bits.reshape(-1, 8) * weights).sum(1).to(torch.uint8)


@ge_op("DropOutDoMask")
def dropout(x: Tensor, mask: Tensor, keep_prob: Number) -> Tensor:
    """X / keep_prob where the packed mask has a 1, else 0."""
    if mask.numel() * 8 < x.numel():
        raise KernelError("mask", f"{mask.numel() * 8} bits", f"at least {x.numel()}")
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = torch.bitwise_and(torch.bitwise_right_shift(mask.reshape(-1, 1), shifts), 1)
    kept = bits.reshape(-1)[: x.numel()].bool().reshape(x.shape)
    scaled = x.float() / keep_prob if keep_prob else x.float()
    return torch.where(kept, scaled, 0.0).to(x.dtype)


@ge_op("MultinomialWithReplacement", pure=False)
def multinomial(
    x: Tensor, seed: Int, offset: Int, *, numsamples: int, replacement: bool = False
) -> Tensor:
    """Draw `numsamples` column indices from every row of weights, int64."""
    return torch.multinomial(x.float(), numsamples, replacement, generator=_generator(seed, offset))
