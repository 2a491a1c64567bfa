"""``generate()`` of a compiled model writes the tokens that eager writes."""

from __future__ import annotations

import pytest
import torch

from tests.models.running import compile_on_npu
from tests.models.zoo import build, token_ids


@pytest.mark.parametrize(
    "model",
    ["mixtral", *(pytest.param(m, marks=pytest.mark.zoo) for m in ("qwen3_moe", "deepseek_v3"))],
)
def test_greedy_tokens_equal_those_of_eager(model: str) -> None:
    torch._dynamo.reset()
    ids = token_ids(tokens=6)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    want = build(model).generate(ids, **options)
    compiled, backend = compile_on_npu(build(model), dynamic=True)
    got = compiled.generate(ids.npu(), **options)
    assert torch.equal(got.cpu(), want)
