"""Hand-written MoE layers in the styles of public code, each with what is expected of the passes.

Written anew from what is publicly said of the algorithms: Megatron-LM, torchtitan, DeepSeek, the
Mistral reference, vLLM, gpt-fast, GShard, DeepSpeed, MegaBlocks, Tutel and smaller ones.
"""

from __future__ import annotations

from tests.passes.styles import (
    capacity,
    dense,
    expert_loops,
    routing_maps,
    slots,
    sorted_grouped,
    split_lists,
)
from tests.passes.styles.parts import HIDDEN, Style

_MASKS = frozenset({"one_hot", "cumsum", "argmax"})
"""Where weights depend on which tokens are dropped, the router holds the masks and ranks."""


_LOADS = frozenset({"histc"})
"""The layer keeps a statistic of its loads, which reads the counts of the source."""

_SCATTERED = frozenset({"scatter", "scatter_"})
"""The router puts its best logits among ``-inf`` before the softmax, or its weights among zeros."""


def _sequences(tokens: int) -> tuple[int, int, int]:
    return (2, tokens, HIDDEN)


STYLES = [
    Style(sorted_grouped.TorchtitanScoreBefore, "P2", router_ops=_LOADS),
    Style(sorted_grouped.TorchtitanScoreAfter, "P2", router_ops=_LOADS),
    Style(sorted_grouped.MegatronLegacyIndices, "P1"),
    Style(sorted_grouped.MegablocksSort, "P1"),
    Style(sorted_grouped.ArgsortOfArgsort, "P1"),
    Style(sorted_grouped.ArgsortOfArgsortBincount, "P1", "prepare"),
    Style(routing_maps.MegatronRoutingMap, "P3"),
    Style(routing_maps.MegatronMaskedSelect, "P3", "flags"),
    Style(routing_maps.MegatronSequentialExperts, "P3", "flags"),
    Style(routing_maps.MegatronDropAndPad, "P10", graphs=2),
    Style(expert_loops.MistralReference, "P4", "flags"),
    Style(expert_loops.DeepseekV3Official, "P4", "prepare"),
    Style(expert_loops.DeepseekRemoteTraining, "P4", "flags"),
    Style(expert_loops.VllmTorchMoe, "P4", "prepare"),
    Style(expert_loops.MakeMoe, "P4", "prepare", router_ops=_SCATTERED),
    Style(expert_loops.MakeMoeWithoutIf, "P4", "flags", router_ops=_SCATTERED),
    Style(expert_loops.OneHotLoop, "P4", "flags"),
    Style(split_lists.TorchtitanLoop, "P5", "flags", router_ops=_LOADS),
    Style(split_lists.DeepseekMoeInference, "P5", "prepare"),
    Style(split_lists.DeepseekV2Inference, "P5", "prepare"),
    Style(split_lists.SparseDispatcher, "P5", "flags"),
    Style(split_lists.GraniteSplits, "P5", "flags"),
    Style(dense.GptFastGather, "P6"),
    Style(dense.BatchedGather, "P6"),
    Style(dense.Llama4Dense, "P7", router_ops=_SCATTERED),
    Style(dense.DenseEinsum, "P7", router_ops=_SCATTERED),
    Style(dense.DenseEinsumSmallGates, "P7", status="kept", check="dense-gate"),
    Style(dense.VllmIterative, "P7"),
    Style(capacity.GShardEinsum, "P8", router_ops=_MASKS, graphs=0),
    Style(capacity.NanoMoe, "P8", router_ops=frozenset({"scatter_"}), graphs=0),
    Style(capacity.LucidrainsTop2, "P8", shape=_sequences, router_ops=_MASKS, graphs=0),
    Style(slots.TutelCumsum, "P9", graphs=2),
    Style(slots.MegablocksBinned, "P9", "flags", graphs=2),
    Style(slots.VllmAlignBlock, "P9", "flags"),
    Style(capacity.ExpertChoice, "P11", status="kept", check="expert-choice", graphs=2),
]
