"""Training beyond one step: an optimizer on compiled gradients, activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.running import assert_gradients_close, compile_on_npu, train
from tests.models.zoo import build, token_ids


def losses(model: Any, ids: torch.Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "model",
    ["mixtral", *(pytest.param(m, marks=pytest.mark.zoo) for m in ("qwen3_moe", "deepseek_v3"))],
)
def test_three_steps_of_adamw_follow_eager(model: str) -> None:
    torch._dynamo.reset()
    ids = token_ids()
    compiled, _ = compile_on_npu(build(model).train())
    got, want = losses(compiled, ids.npu()), losses(build(model).train(), ids)
    assert want[2] < want[0] - 0.1
    assert got == pytest.approx(want, abs=2e-4)


def test_activation_checkpointing() -> None:
    torch._dynamo.reset()
    ids = token_ids()
    model = build("mixtral").train()
    want = train(model, ids)
    model.gradient_checkpointing_enable()
    compiled, backend = compile_on_npu(model)
    got = train(compiled, ids.npu())
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-5)
    assert_gradients_close(got.gradients, want.gradients, limit=1e-4)
    assert len(backend.report.rewritten) == 2
