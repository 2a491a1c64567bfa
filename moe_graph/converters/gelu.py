"""GE lowering of GELU that computes what the source asks for.

TorchAir lowers both kinds of GELU to one op, that of the tanh approximation, which differs from the
exact function by up to 5e-4: enough to send a token to another expert.

::

    aten.gelu(x)                        before  Gelu(x)
                                        after   GeluV2(x) {approximate "none"}
    aten.gelu_backward(dy, x)           before  GeluGrad(dy, x, dy)
                                        after   GeluGradV2(dy, x) {approximate "none"}
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def register_gelu() -> None:
    """Register the two converters with TorchAir, in place of its own."""
    import torchair

    torchair.register_fx_node_ge_converter(aten.gelu.default)(_convert)
    torchair.register_fx_node_ge_converter(aten.gelu_backward.default)(_convert_backward)


def _convert(self: Any, *, approximate: str = "none", meta_outputs: Any = None) -> Any:
    from torchair._ge_concrete_graph import ge_apis as ge

    return ge.GeluV2(self, approximate=approximate)


def _convert_backward(
    grad_output: Any, self: Any, *, approximate: str = "none", meta_outputs: Any = None
) -> Any:
    from torchair._ge_concrete_graph import ge_apis as ge

    return ge.GeluGradV2(grad_output, self, approximate=approximate)
