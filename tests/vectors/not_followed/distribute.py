"""Cases of the distribute family that are not followed: ``(file, case)`` and the reason.

A tiling test that names no result expects a failure; `adapters/distribute.py` reads them so.
"""

from __future__ import annotations

_ACCEPTED = "upstream accepts it, the documents do not: "
_REJECTED = "upstream rejects it, for a reason that the documents and the case do not give"

REASONS: dict[tuple[str, str], str] = {
    ("tiling_moe_distribute_combine_arch35", "EpWorldSize4"): _REJECTED,
    ("tiling_moe_distribute_combine_arch35", "EpWorldSize144"): _REJECTED,
    ("tiling_moe_distribute_combine_arch35", "GlobalBsNonZero"): _REJECTED,
    ("tiling_moe_distribute_dispatch_arch22", "GlobalBsNonZero"): _REJECTED,
    ("tiling_moe_distribute_dispatch_arch22", "A5GlobalBsNonZero"): _REJECTED,
    ("tiling_moe_distribute_dispatch_v2_arch22", "ZeroComputeExpertNumInvalid"): _ACCEPTED
    + "zero_expert_num: got 4294967307 experts in all, want <= 2147483647",
    ("tiling_moe_distribute_dispatch_v2_arch22", "A2CommAlgEmptyPcieEnvHierarchy"): _REJECTED,
    ("tiling_moe_distribute_combine_v2_arch22", "A2_HierarchyWithZeroComputeExpert"): _ACCEPTED
    + "zero_expert_num: got 1, want none with comm_alg='hierarchy' on A2",
}
