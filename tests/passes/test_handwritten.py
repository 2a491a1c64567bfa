"""Every spelling of each piece of a hand-written layer is read for what it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.passes.capturing import Capture, compile_rewritten, result_and_gradients
from tests.passes.handwritten import (
    COMBINES,
    COUNTS,
    DISPATCHES,
    HIDDEN,
    INVERSES,
    SORTS,
    TOKENS,
    HandwrittenMoe,
    Routing,
)


def check_rewritten(module: torch.nn.Module, dynamic: bool = False) -> Capture:
    x = torch.randn(TOKENS, HIDDEN)
    expected, expected_gradients = result_and_gradients(module, module, x)
    compiled, capture = compile_rewritten(module, dynamic=dynamic)
    result, gradients = result_and_gradients(compiled, module, x)

    (layer,) = capture.layers
    assert layer.status == "rewritten", str(layer.reasons[0])
    ops = capture.ops
    assert ops["moe_init_routing_v2"] == ops["moe_finalize_routing_v2"] == 1
    assert ops["grouped_matmul_single"] == 2
    assert not {"sort", "argsort", "histc", "cumsum", "grouped_mm_fallback"} & set(ops)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        if gradient is None:
            assert gradients[name] is None or not gradients[name].any(), name
        else:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    return capture


def _cases(name: str, pieces: dict[str, Any]) -> list[Any]:
    return [pytest.param({name: piece}, id=f"{name}:{key}") for key, piece in pieces.items()]


def _with_inverse(inverse: Any) -> Any:
    def combine(r: Routing, y: torch.Tensor) -> torch.Tensor:
        weighted = y * r.weights.view(-1)[r.order].unsqueeze(-1)
        return weighted[inverse(r)].view(*r.ids.shape, HIDDEN).sum(1)

    return combine


@pytest.mark.parametrize(
    "pieces",
    [
        *_cases("sort", SORTS),
        *_cases("dispatch", DISPATCHES),
        *_cases("counts", COUNTS),
        *_cases("combine", COMBINES),
        *_cases("combine", {f"inverse-{k}": _with_inverse(v) for k, v in INVERSES.items()}),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_spelling(pieces: dict[str, Any], dynamic: bool) -> None:
    check_rewritten(HandwrittenMoe(**pieces), dynamic)
