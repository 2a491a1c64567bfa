"""Cases of the distribute family that are not followed: ``(file, case)`` and the reason.

Where a case says SUCCESS without a tiling key, its expectation was not extracted: cases that
upstream names invalid stand there like that. Those that documented limits reject are listed here.
"""

from __future__ import annotations

_LOST = "the expected status was not extracted; the documented limits reject it: "
_ACCEPTED = "upstream accepts it, the documents do not: "
_OUTPUTS = "rejects declared outputs, of which accepted cases have other layouts"

REASONS: dict[tuple[str, str], str] = {
    (
        "csv_moe_distribute_combine_v2_tiling",
        "arch35_test5",
    ): "what is wrong with it is not documented",
    ("tiling_moe_distribute_combine_arch35", "EpWorldSize4"): _LOST
    + "ep_world_size: got ep = 4, want one of 8, 16, 32, 64, 128, 144, 256, 288 on 950",
    ("tiling_moe_distribute_combine_arch35", "EpWorldSizeInvalid"): _LOST
    + "expert_ids: got K = 7, want <= 5 experts",
    ("tiling_moe_distribute_dispatch_arch22", "Test1"): _LOST
    + "x: got H = 7160, want one of 7168 on A3",
    ("tiling_moe_distribute_dispatch_arch22", "Test2"): _LOST
    + "x: got H = 7160, want one of 7168 on A3",
    ("tiling_moe_distribute_dispatch_arch22", "Test8"): _LOST
    + "expert_shard_type: got 1, want 0 on A3",
    ("tiling_moe_distribute_dispatch_arch22", "A2ShapeAndEpRankId"): _LOST
    + "ep_rank_id: got 33, want in [0, 32), ep_world_size",
    ("tiling_moe_distribute_dispatch_arch22", "InvalidExpertTokenNumsShared"): _OUTPUTS,
    ("tiling_moe_distribute_dispatch_v2_arch22", "Test3"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 257 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "Test4"): _LOST
    + "quant_mode: got 1, want one of 0, 2 on A3",
    ("tiling_moe_distribute_dispatch_v2_arch22", "Test8"): _LOST
    + "expert_shard_type: got 1, want 0 on A3",
    ("tiling_moe_distribute_dispatch_v2_arch22", "EpWorldSize384"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 352 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "ZeroComputeExpertNumInvalid"): _ACCEPTED
    + "zero_expert_num: got 4294967307 experts in all, want <= 2147483647",
    ("tiling_moe_distribute_dispatch_v2_arch22", "A2CommalgError"): _LOST
    + "comm_alg: got 'error', want one of '', '0', 'fullmesh', 'hierarchy' on A2",
    ("tiling_moe_distribute_dispatch_v2_arch22", "A3QuantMode2WithScales"): _LOST
    + "scales: got dim 0 (one row per expert) 7, want 8",
    ("tiling_moe_distribute_dispatch_v2_arch22", "A3ElasticInfoQuant2"): _LOST
    + "elastic_info: got dim 0 148, want 20",
    ("tiling_moe_distribute_dispatch_v2_arch22", "PerformanceInfo"): _LOST
    + "elastic_info: got dim 0 148, want 580",
    ("tiling_moe_distribute_dispatch_v2_arch22", "ExpertTokenNumsType0"): _LOST
    + "moe_expert_num: got 8, want a multiple of the 7 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "MoeExpertNumNotDivisibleByMoeRankNum"): _LOST
    + "moe_expert_num: got 10, want a multiple of the 7 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "SharedExpertNum2"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 224 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "LargeKValue"): _LOST
    + "moe_expert_num: got 16, want a multiple of the 15 ranks that hold",
    ("tiling_moe_distribute_dispatch_v2_arch22", "PerformanceInfoEnabled"): _LOST
    + "performance_info: got float32, want int64 on A3",
    ("tiling_moe_distribute_dispatch_v2_arch22", "HierarchyCommAlg"): _LOST
    + "scales: got a tensor, want nothing with quant_mode=0, torch.float16",
    ("tiling_moe_distribute_dispatch_v2_arch22", "ElasticInfoAndPerformanceBothEnabled"): _LOST
    + "performance_info: got float32, want int64 on A3",
    ("tiling_moe_distribute_dispatch_v2_arch22", "BadEpRecvCountsOutputDtype"): _OUTPUTS,
    ("tiling_moe_distribute_dispatch_v2_arch22", "BadTpRecvCountsOutputDtype"): _OUTPUTS,
    ("tiling_moe_distribute_dispatch_v2_arch22", "A3Arch22BadExpandXDtypeQuant2"): _OUTPUTS,
    ("tiling_moe_distribute_dispatch_v2_arch22", "A3Arch22BadNoQuantExpandXMismatch"): _OUTPUTS,
    ("tiling_moe_distribute_dispatch_v2_arch22", "A3MxDynamicScales1DBad"): _OUTPUTS,
    ("tiling_moe_distribute_combine_arch22", "Test1"): _LOST
    + "expert_scales: got dim 0 32, want 16",
    ("tiling_moe_distribute_combine_arch22", "Test2"): _LOST
    + "expert_scales: got dim 0 32, want 16",
    ("tiling_moe_distribute_combine_arch22", "Test3"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 257 ranks that hold",
    ("tiling_moe_distribute_combine_arch22", "A2"): _ACCEPTED
    + "moe_expert_num: got experts per rank = 0, want in [1, 24] on A2",
    ("tiling_moe_distribute_combine_arch22", "A2Shape"): _LOST
    + "expand_x: got H = 7160, want in [1, 7168], a multiple of 32 on A2",
    ("tiling_moe_distribute_combine_arch22", "A2EpRankId"): _LOST
    + "ep_rank_id: got 33, want in [0, 32)",
    ("tiling_moe_distribute_combine_arch22", "A2MoeExpertNum"): _LOST
    + "moe_expert_num: got 257, want a multiple of the 32 ranks that hold",
    ("tiling_moe_distribute_combine_arch22", "EpWorldSize384"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 352 ranks that hold",
    ("tiling_moe_distribute_combine_arch22", "EpWorldSize72"): _LOST
    + "ep_world_size: got ep = 72, want one of 8, 16, 32, 64, 128, 144, 256, 288 on A3",
    ("tiling_moe_distribute_combine_arch22", "A2Int8Quant"): _ACCEPTED
    + "moe_expert_num: got experts per rank = 0, want in [1, 24] on A2",
    ("tiling_moe_distribute_combine_arch22", "A2InvalidCommQuantMode"): _LOST
    + "comm_quant_mode: got 3, want one of 0, 2",
    ("tiling_moe_distribute_combine_arch22", "A5_TpWorldSize1_Success"): _LOST
    + "expand_x: got 256 rows, want >= 288, what can arrive",
    ("tiling_moe_distribute_combine_arch22", "A5_EpWorldSize4"): _LOST
    + "ep_world_size: got ep = 4, want one of 8, 16, 32, 64, 128, 144, 256, 288 on A3",
    ("tiling_moe_distribute_combine_arch22", "A5_EpWorldSizeOdd"): _LOST
    + "expert_ids: got K = 7, want <= 6 experts",
    ("tiling_moe_distribute_combine_arch22", "A5_ExpandXInt32DataType"): _LOST
    + "expand_x: got int32, want bfloat16 or float16: int32 is reserved",
    ("tiling_moe_distribute_combine_arch22", "A5_InvalidSharedExpertNum"): _LOST
    + "shared_expert_num: got 0 on 1 ranks",
    ("tiling_moe_distribute_combine_arch22", "A5_InvalidExpertShardType"): _LOST
    + "expert_shard_type: got 1, want 0 on A3",
    ("tiling_moe_distribute_combine_arch22", "A5_SharedExpertRankNumTooLarge"): _LOST
    + "shared_expert_rank_num: got 10, want in [0, 8), ep_world_size",
    ("tiling_moe_distribute_combine_v2_arch22", "Test3"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 257 ranks that hold",
    ("tiling_moe_distribute_combine_v2_arch22", "EpWorldSize384"): _LOST
    + "moe_expert_num: got 256, want a multiple of the 352 ranks that hold",
    ("tiling_moe_distribute_combine_v2_arch22", "EpWorldSize72"): _LOST
    + "moe_expert_num: got 216, want a multiple of the 40 ranks that hold",
    ("tiling_moe_distribute_combine_v2_arch22", "ElasticInfo"): _LOST
    + "elastic_info: got dim 0 288, want 148",
    ("tiling_moe_distribute_combine_v2_arch22", "Moepp"): _LOST
    + "const_expert_alpha_1: got shape [6], want 2 dimensions",
    ("tiling_moe_distribute_combine_v2_arch22", "CopyExpertWithoutOriX"): _LOST
    + "ori_x: got nothing, want [BS, H], with copy or const experts",
    ("tiling_moe_distribute_combine_v2_arch22", "ConstExpertWithoutOriX"): _LOST
    + "const_expert_alpha_1: got shape [6], want 2 dimensions",
    ("tiling_moe_distribute_combine_v2_arch22", "A2CommalgFullmesh"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2CommalgFullmeshWithEnv"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2CommalgHierarchy"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2_HierarchyWithZeroComputeExpert"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2_HierarchyWith2DActiveMask"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2_HierarchyWithPerformanceInfo"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2CommalgEmptyWithEnvCommint8"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2CommalgHierarchyCommint8"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A3_MxFp8E5M2Quant"): _ACCEPTED
    + "comm_quant_mode: got 3, want one of 0, 2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2_CopyExpertWithOriX"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A2_XActiveMask1D"): _ACCEPTED
    + "expert_scales: got int32, want float32 on A2",
    ("tiling_moe_distribute_combine_v2_arch22", "A3_HierarchyWithZeroComputeExpert"): _LOST
    + "zero_expert_num: got 1 with comm_alg='hierarchy' on A3",
    ("tiling_moe_distribute_combine_v2_arch22", "A3_HierarchyWith2DActiveMask"): _LOST
    + "x_active_mask: got shape [8, 1], want [BS] with comm_alg='hierarchy' on A3",
    ("tiling_moe_distribute_combine_v2_arch22", "A3_HierarchyWithPerformanceInfo"): _LOST
    + "performance_info: got a tensor, want nothing on A3",
}
