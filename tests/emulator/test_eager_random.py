"""Random numbers on the emulated device: reproducible, replayable, and apart from the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(20, device="npu"),
    "randn": lambda: torch.randn(20, device="npu"),
    "randint": lambda: torch.randint(0, 1000, (20,), device="npu"),
    "randperm": lambda: torch.randperm(20, device="npu"),
    "rand_like": lambda: torch.rand_like(torch.ones(20, device="npu")),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(100, device="npu"), 20),
    "normal": lambda: torch.normal(torch.zeros(20, device="npu"), torch.ones(20, device="npu")),
    "exponential_": lambda: torch.empty(20, device="npu").exponential_(),
    "uniform_": lambda: torch.empty(20, device="npu").uniform_(-1, 1),
    "dropout": lambda: F.dropout(torch.ones(40, device="npu"), 0.5),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(20, device="npu")),
}


@pytest.mark.parametrize("name", DRAWS)
def test_seed_makes_it_reproducible(name: str) -> None:
    torch.manual_seed(1)
    first, second = DRAWS[name](), DRAWS[name]()
    torch.manual_seed(1)
    assert torch.equal(DRAWS[name](), first)
    assert torch.equal(DRAWS[name](), second)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(DRAWS[name](), first)


@pytest.mark.parametrize("name", DRAWS)
def test_the_stream_of_the_cpu_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    want = torch.rand(4)
    torch.manual_seed(1)
    DRAWS[name]()
    assert torch.equal(torch.rand(4), want)


def test_state_can_be_replayed() -> None:
    state = torch.npu.get_rng_state()
    first = torch.rand(8, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="npu"), first)


def test_generator_of_the_device() -> None:
    one = torch.Generator(device="npu").manual_seed(7)
    other = torch.Generator(device="npu").manual_seed(7)
    draws = [torch.rand(8, device="npu", generator=g) for g in (one, other, one)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_statistics() -> None:
    x = torch.randn(20_000, device="npu")
    assert abs(x.mean().item()) < 0.05
    assert abs(x.std().item() - 1) < 0.05
    kept = (F.dropout(torch.ones(20_000, device="npu"), 0.25) > 0).float().mean().item()
    assert abs(kept - 0.75) < 0.02


def test_gradient_goes_where_dropout_kept() -> None:
    x = torch.ones(40, device="npu", requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_checkpointing_replays_dropout() -> None:
    x = torch.ones(64, device="npu", requires_grad=True)
    kept: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.5)
        kept.append(y.detach())
        return y.sin().sum()

    checkpoint(block, x, use_reentrant=False).backward()
    assert len(kept) == 2
    assert torch.equal(kept[0], kept[1])
