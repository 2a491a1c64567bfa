"""With ``dynamic=True`` one compile serves every token count but 1, and the results are right."""

from __future__ import annotations

import random

import pytest
import torch

from tests.models.running import compile_on_npu, infer
from tests.models.zoo import MOE_LAYERS, build, token_ids


@pytest.mark.parametrize(
    "model",
    [
        "mixtral",
        *(pytest.param(m, marks=pytest.mark.zoo) for m in MOE_LAYERS if m != "mixtral"),
    ],
)
def test_forty_token_counts_cost_at_most_two_compiles(model: str) -> None:
    torch._dynamo.reset()
    # Among them are numbers of heads and widths of heads, which must not make graphs of their own.
    counts = [9, 2, 4, 16, 24, *random.Random(0).sample(range(25, 65), 34)]
    eager = build(model)
    compiled, backend = compile_on_npu(build(model), dynamic=True)

    def check(tokens: int) -> None:
        ids = token_ids(batch=1, tokens=tokens, seed=tokens)
        torch.testing.assert_close(infer(compiled, ids.npu()), infer(eager, ids), rtol=0, atol=1e-5)

    for tokens in counts:
        check(tokens)
    assert backend.report.graphs == 1
    check(1)  # dynamo takes sizes 0 and 1 for constants
    assert backend.report.graphs == 2
    assert not backend.report.kept
