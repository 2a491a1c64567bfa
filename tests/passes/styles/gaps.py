"""The styles that are not served as they are to be, for the tests that expect them to fail."""

from __future__ import annotations

_P7 = "P7: an expert of a loop that runs on all tokens is not read"
_P8 = "P8: one-hot dispatch with capacity is not read"
_P9 = "P9: slots by running counts are not read"
_P10 = "P10: dropping by probability is not read"

GAPS: dict[str, str] = {
    "MegatronDropAndPad": _P10,
    "VllmIterative": _P7,
    "GShardEinsum": _P8,
    "NanoMoe": _P8,
    "LucidrainsTop2": _P8,
    "TutelCumsum": _P9,
    "MegablocksBinned": _P9,
    "VllmAlignBlock": _P9,
}
"""Style -> why it is not served as it is to be."""
