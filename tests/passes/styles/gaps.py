"""The styles that are not served as they are to be, for the tests that expect them to fail."""

from __future__ import annotations

_P2 = "P2: histc stays where the layer counts its loads with it, and has no lowering"
_P4_REPEAT = "P4: copies of tokens by view and repeat are not read as rows of tokens"
_P4_GATES = "P4: gates [T, E] at the tokens and the column of an expert are not read as its weights"
_P5 = "P5: host split lists are not read"
_P7 = "P7: nothing is proved, or said, of dense experts"
_P8 = "P8: one-hot dispatch with capacity is not read"
_P9 = "P9: slots by running counts are not read"
_P10 = "P10: dropping by probability is not read"
_P11 = "P11: nothing is said of expert choice"

GAPS: dict[str, str] = {
    "TorchtitanScoreBefore": _P2,
    "TorchtitanScoreAfter": _P2,
    "MegatronSequentialExperts": _P5,
    "MegatronDropAndPad": _P10,
    "VllmTorchMoe": _P4_REPEAT,
    "MakeMoe": _P4_GATES,
    "MakeMoeWithoutIf": _P4_GATES,
    "TorchtitanLoop": _P5,
    "DeepseekMoeInference": _P5,
    "DeepseekV2Inference": _P5,
    "SparseDispatcher": _P5,
    "GraniteSplits": _P5,
    "Llama4Dense": _P7,
    "DenseEinsum": _P7,
    "DenseEinsumSmallGates": _P7,
    "VllmIterative": _P7,
    "GShardEinsum": _P8,
    "NanoMoe": _P8,
    "LucidrainsTop2": _P8,
    "TutelCumsum": _P9,
    "MegablocksBinned": _P9,
    "VllmAlignBlock": _P9,
    "ExpertChoice": _P11,
}
"""Style -> why it is not served as it is to be."""
