"""Graphs that write their inputs, random ops, several graphs, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torchair
from ge_graphs import SESSION, add, ge, serialise
from through_torchair import assert_same, compiled, to_npu
from torch import Tensor
from torchair.ge import DataType

from moe_graph.emulator.engine import session


def test_a_step_of_momentum_writes_its_state() -> None:
    def step(weight: Tensor, velocity: Tensor, grad: Tensor) -> Tensor:
        velocity.mul_(0.9).add_(grad)
        weight.sub_(0.1 * velocity)
        return weight.sum()

    torch.manual_seed(0)
    state = [torch.randn(4, 3) for _ in range(3)]
    on_npu = to_npu([each.clone() for each in state])
    program = compiled(step)
    for _ in range(3):
        assert_same(program(*on_npu), step(*state))
    assert_same(on_npu, state)


def test_swapped_buffers() -> None:
    def swap(a: Tensor, b: Tensor) -> Tensor:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return old

    a, b = torch.arange(3.0), torch.arange(3.0) + 10
    on_npu = to_npu((a.clone(), b.clone()))
    assert_same(compiled(swap)(*on_npu), a)
    assert_same(on_npu, (b, a))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_key_value_cache_is_filled_in_place(dynamic: bool) -> None:
    def step(cache: Tensor, new: Tensor, mask: Tensor) -> Tensor:
        cache.copy_(torch.where(mask, new, cache))
        return cache.softmax(-1)

    torch.manual_seed(0)
    cache = torch.zeros(2, 4, 3)
    on_npu = cache.clone().npu()
    program = compiled(step, dynamic=dynamic)
    for position in range(3):
        new = torch.randn(2, 1, 3)
        mask = (torch.arange(4) == position)[None, :, None]
        assert_same(program(on_npu, *to_npu((new, mask))), step(cache, new, mask))
    assert_same(on_npu, cache)


def test_an_output_that_views_an_input_is_a_copy() -> None:
    x = torch.arange(6.0)
    on_npu = x.npu()
    results = compiled(lambda x: [x.clone(), x.view(2, 3) * 1, x.reshape(3, 2).clone()])(on_npu)
    on_npu.zero_()
    assert_same(results, [x, x.view(2, 3), x.view(3, 2)])


def test_random_ops_follow_the_seed() -> None:
    program = compiled(
        lambda x: [torch.rand(x.shape, device=x.device), torch.randn(x.shape, device=x.device)]
    )
    x = torch.zeros(10_000).npu()

    def draw() -> list[Tensor]:
        torch.npu.manual_seed(7)
        return [each.cpu() for each in program(x)]

    uniform, gaussian = draw()
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02
    assert abs(gaussian.mean()) < 0.05
    assert abs(gaussian.std() - 1) < 0.05
    assert_same(draw(), [uniform, gaussian])
    assert not torch.equal(program(x)[0].cpu(), uniform), "the offset does not advance"


def test_settings_of_the_caller_do_not_reach_into_the_graph() -> None:
    """Autocast for CPU tensors, default dtype and default device are the caller's business."""
    x = torch.randn(16, 16)
    want = [x @ x, F.silu(x), torch.arange(3, dtype=torch.int32), x @ x.tril()]
    model = serialise(
        lambda x: [
            ge.MatMul(x, x, None), ge.Swish(x),
            ge.Range(*(ge.Const(bound, DataType.DT_INT32) for bound in (0, 3, 1))),
            ge.MatMul(x, ge.Tril(x), None),
        ], [x],
    )  # fmt: skip
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = session.run(SESSION, add(model), [x])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert_same(got, want)


def test_frozen_parameters_may_be_updated() -> None:
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    layer = torch.nn.Linear(4, 3).npu()
    program = torch.compile(layer, backend=torchair.get_npu_backend(compiler_config=config))
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            want = F.linear(x, layer.weight.cpu(), layer.bias.cpu())
            assert_same(program(x.npu()), want)
            layer.weight.mul_(2)


def test_two_graphs_in_two_threads() -> None:
    torch.manual_seed(0)
    first = torch.compile(lambda x: F.silu(x) @ x, backend=torchair.get_npu_backend())
    second = torch.compile(lambda x: x.softmax(-1).sum(0), backend=torchair.get_npu_backend())
    x = torch.randn(8, 8)
    want = (F.silu(x) @ x, x.softmax(-1).sum(0))
    assert_same((first(x.npu()), second(x.npu())), want)
    results: list[list[Tensor]] = [[], []]

    def work(program: object, into: list[Tensor]) -> None:
        for _ in range(20):
            into.append(program(x.npu()).cpu())  # type: ignore[operator]

    threads = [
        threading.Thread(target=work, args=(program, into))
        for program, into in zip((first, second), results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(results, want, strict=True):
        assert len(got) == 20
        for each in got:
            assert_same(each, expected)
