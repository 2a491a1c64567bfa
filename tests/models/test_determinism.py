"""The same input gives the same bits, run after run and for any number of threads."""

from __future__ import annotations

import torch

from tests.models.running import compile_on_npu, infer, train
from tests.models.zoo import build, token_ids


def test_logits_and_gradients_have_the_same_bits() -> None:
    torch._dynamo.reset()
    ids = token_ids().npu()
    compiled, _ = compile_on_npu(build("mixtral"))
    threads = torch.get_num_threads()
    first = infer(compiled, ids)
    try:
        for run in range(20):
            torch.set_num_threads(1 + run % 2)
            assert torch.equal(infer(compiled, ids), first)
        steps = []
        for count in (1, 2):
            torch.set_num_threads(count)
            steps.append(train(compiled.train(), ids))
    finally:
        torch.set_num_threads(threads)
    one, two = (step.gradients for step in steps)
    assert all(torch.equal(one[name], two[name]) for name in one)
