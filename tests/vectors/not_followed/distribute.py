"""Cases of the distribute family that are not followed: ``(file, case)`` and the reason.

A tiling test that names no result expects a failure; `adapters/distribute.py` reads them so.
"""

from __future__ import annotations

_ACCEPTED = "upstream accepts it, the documents do not: "
_REJECTED = "upstream rejects it, for a reason that the documents and the case do not give"

REASONS: dict[tuple[str, str], str] = {
    ("tiling_moe_distribute_combine_arch35", "EpWorldSize144"): _REJECTED,
    ("tiling_moe_distribute_combine_arch35", "GlobalBsNonZero"): _REJECTED,
    ("tiling_moe_distribute_dispatch_arch22", "Test0"): _ACCEPTED
    + "dynamic_scales: got float16[576], want float32[288]",
    ("tiling_moe_distribute_dispatch_v2_arch22", "ZeroComputeExpertNumInvalid"): _ACCEPTED
    + "zero_expert_num: got 4294967307 experts in all, want <= 2147483647",
    ("tiling_moe_distribute_dispatch_v2_arch22", "A2CommAlgEmptyPcieEnvHierarchy"): _REJECTED,
    ("tiling_moe_distribute_combine_arch22", "A5_TpWorldSize1_Success"): _ACCEPTED
    + "expand_x: got 256 rows, want >= 288, what can arrive",
    ("tiling_moe_distribute_combine_arch22", "A5_GlobalBsNonZero"): _REJECTED,
    ("tiling_moe_distribute_combine_arch22", "A5_TpWorldSizeGt2_Rejected"): _REJECTED,
    ("tiling_moe_distribute_combine_v2_arch22", "A2_HierarchyWithZeroComputeExpert"): _ACCEPTED
    + "zero_expert_num: got 1, want none with comm_alg='hierarchy' on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A3_MxFp8E5M2Quant"): _ACCEPTED
    + "comm_quant_mode: got 3, want one of 0, 2",
}
