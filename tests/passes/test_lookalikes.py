"""Graphs without MoE layers pass through as they came, and nothing is said about them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.capturing import compile_rewritten
from tests.passes.lookalikes import LOOKALIKES, BucketLoop

SPOKEN_OF = {BucketLoop}
"""So near to a layer that the report may say why it is none."""


@pytest.mark.parametrize(
    ("module", "inputs"), LOOKALIKES, ids=[module.__name__ for module, _ in LOOKALIKES]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_lookalike_is_left_alone(module, inputs, dynamic: bool) -> None:
    args = inputs()
    network = module()
    compiled, capture = compile_rewritten(network, dynamic=dynamic)
    result = compiled(*args)

    assert all(layer.status == "kept" for layer in capture.layers)
    assert capture.layers == [] or module in SPOKEN_OF
    assert capture.after == capture.before
    torch.testing.assert_close(result, network(*args))


def test_dense_transformer_layer_is_left_alone() -> None:
    network = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    compiled, capture = compile_rewritten(network)
    compiled(torch.randn(2, 5, 16))

    assert capture.layers == []
    assert capture.after == capture.before
