"""The options that TorchAir passes to GE with a graph: which the engine obeys, which it refuses.

Most options steer scheduling, memory or fusion and leave the numbers alone; they are not read.
Those below could change results.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_graph.emulator.engine.errors import GraphError

#: Option -> values under which results stay what the graph says. Permissions to compute less
#: precisely (``allow_...``, hf32) are not used: every op computes in the dtype of its inputs.
_ALLOWED: dict[str, frozenset[str]] = {
    "ge.exec.precision_mode": frozenset(
        {
            "",
            "must_keep_origin_dtype",
            "allow_fp32_to_fp16",
            "allow_fp32_to_bf16",
            "allow_mix_precision",
            "allow_mix_precision_fp16",
            "allow_mix_precision_bf16",
        }
    ),
    "ge.exec.precision_mode_v2": frozenset(
        {"", "origin", "mixed_float16", "mixed_bfloat16", "mixed_hif8"}
    ),
}

#: Options that ask for several static shapes in one graph, which the engine does not offer.
_GEARS = ("ge.dynamicDims", "ge.dynamicNodeType", "ge.inputShape")


def check(options: Mapping[str, str]) -> None:
    """Refuse options that the engine would have to ignore although they change results.

    Raises:
        GraphError: names the option, its value, and the values that work.
    """
    for name, allowed in _ALLOWED.items():
        value = options.get(name, "")
        if value not in allowed:
            raise GraphError(
                repr(value), argument=f"option {name}",
                want="one of " + ", ".join(sorted(allowed - {""})),
                hint="the emulator computes in the dtypes of the graph",
            )  # fmt: skip
    for name in _GEARS:
        if options.get(name):
            raise GraphError(
                repr(options[name]), argument=f"option {name}", want="it unset",
                hint="shape gears are not emulated; compile with dynamic=True instead",
            )  # fmt: skip
