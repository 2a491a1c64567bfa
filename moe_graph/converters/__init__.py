"""GE lowering: how torch ops become GE nodes in TorchAir."""

from __future__ import annotations

import functools


@functools.cache
def register_converters() -> None:
    """Register every converter of moe_graph with TorchAir; later calls change nothing.

    Raises:
        ImportError: TorchAir is not installed.
    """
    # TorchAir loads its own converters at the first miss, which would overwrite ours.
    import torchair._ge_concrete_graph.ge_converter.custom  # noqa: F401

    from moe_graph.converters import attention_converters, gelu, generic, grouped_matmul
    from moe_graph.ops.registry import all_opdefs

    for opdef in all_opdefs():
        generic.register(opdef)
    grouped_matmul.register_grouped_matmul()
    attention_converters.register_attention()
    gelu.register_gelu()
