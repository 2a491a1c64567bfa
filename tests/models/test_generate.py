"""``generate()`` of a compiled model writes the tokens that eager writes."""

from __future__ import annotations

import itertools

import pytest
import torch

import moe_graph
from tests.models.zoo import MOE_LAYERS, build, token_ids

IN_EVERY_RUN = {("mixtral", "dynamic"), ("mixtral", "static")}


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.zoo)
        for case in itertools.product(MOE_LAYERS, ("none", "dynamic", "static"))
    ],
)
def test_greedy_tokens_equal_those_of_eager(model: str, cache: str) -> None:
    torch._dynamo.reset()
    ids = token_ids(tokens=6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options["use_cache"] = cache != "none"
    if cache == "static":
        options["cache_implementation"] = "static"
    want = build(model).generate(ids, **options)

    backend = moe_graph.npu_backend()
    compiled = build(model).npu()
    compiled.compile(backend=backend, dynamic=True)  # generate() calls the module, not a wrapper
    got = compiled.generate(ids.npu(), **options)

    assert torch.equal(got.cpu(), want)
    assert len(backend.report.rewritten) >= MOE_LAYERS[model]
    # To write single tokens, generate() switches the experts to batched_mm, which sorts nothing.
    assert all(layer.reasons[0].check == "form" for layer in backend.report.kept)
