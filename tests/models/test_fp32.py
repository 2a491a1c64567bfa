"""Unmodified models in fp32: logits and gradients equal eager PyTorch's, every layer rewritten."""

from __future__ import annotations

import pytest
import torch

from tests.models.running import assert_gradients_close, compile_on_npu, infer, train
from tests.models.zoo import MOE_LAYERS, build, token_ids

IN_EVERY_RUN = {
    ("mixtral", "sdpa", "static"),
    ("mixtral", "eager", "dynamic"),
    ("qwen3_moe", "eager", "static"),
    ("deepseek_v3", "sdpa", "static"),
}
ALL = [
    (model, attention, shapes)
    for model in MOE_LAYERS
    for attention in ("sdpa", "eager")
    for shapes in ("static", "dynamic")
]


@pytest.mark.parametrize(
    ("model", "attention", "shapes"),
    [pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.zoo) for case in ALL],
)
def test_model_infers_and_trains_as_eager_does(model: str, attention: str, shapes: str) -> None:
    torch._dynamo.reset()
    ids = token_ids()
    eager = build(model, attention=attention)
    logits, step = infer(eager, ids), train(eager.train(), ids)

    compiled, backend = compile_on_npu(
        build(model, attention=attention), dynamic=shapes == "dynamic"
    )
    torch.testing.assert_close(infer(compiled, ids.npu()), logits, rtol=0, atol=1e-5)
    compiled_step = train(compiled.train(), ids.npu())

    torch.testing.assert_close(compiled_step.logits, step.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled_step.loss, step.loss, rtol=0, atol=1e-5)
    assert_gradients_close(compiled_step.gradients, step.gradients, limit=1e-4)
    assert backend.report.graphs == 2  # one to infer, one to train
    assert [layer.status for layer in backend.report.layers] == ["rewritten"] * (
        2 * MOE_LAYERS[model]
    )
