"""A compiled layer gives the same bits for any number of threads, and every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moe_graph

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 192, 6, 2
RUNS = 20


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    # Autograd's thread too: kernels in it would hand its setting on to threads that start later.
    y = torch.ones(1, device="npu", requires_grad=True) * 2
    y.register_hook(lambda _: torch.set_num_threads(threads))
    y.backward()
    torch.set_num_threads(threads)


def _block(dtype: torch.dtype) -> MixtralSparseMoeBlock:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    placed: MixtralSparseMoeBlock = block.to("npu", dtype)
    return placed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_give_the_same_bits(dtype: torch.dtype) -> None:
    block = _block(dtype)
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        block, backend=moe_graph.npu_backend(), fullgraph=True
    )
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=generator).to("npu", dtype)
    grad = torch.randn(1, TOKENS, HIDDEN, generator=generator).to("npu", dtype)

    def run(threads: int) -> dict[str, torch.Tensor]:
        torch.set_num_threads(threads)
        x = hidden.clone().requires_grad_()
        y = compiled(x)
        # The gradient is computed in a thread of autograd's, with a setting of its own.
        y.register_hook(lambda _: torch.set_num_threads(threads))
        y.backward(grad)
        found = {"y": y.detach(), "x": x.grad}
        found |= {name: parameter.grad for name, parameter in block.named_parameters()}
        block.zero_grad()
        return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}

    first = run(1)
    assert len(first) == 2 + len(list(block.parameters()))
    assert all(tensor.isfinite().all() for tensor in first.values())
    for number in range(RUNS):
        for name, tensor in run(1 + number % 3).items():
            assert torch.equal(tensor, first[name]), f"run {number}: {name}"
