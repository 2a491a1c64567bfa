"""Cases of the finalize_routing family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

_LOST = "the attribute that is wrong was not extracted"

REASONS: dict[tuple[str, str], str] = {
    (
        "tiling_moe_finalize_routing",
        "MoeFinalizeRouting_tiling_float16",
    ): "bfloat16 scales beside float16 rows are no column of the IR",
    (
        "tiling_moe_finalize_routing",
        "MoeFinalizeRouting_tiling_cut_h_fp16_k8",
    ): "16384 indices for 4096 tokens of 8 experts: the page wants T * K, and the op would read "
    "beyond them",
    (
        "tiling_moe_finalize_routing_v2",
        "MoeFinalizeRoutingTilingV2_invalid_drop_pad_mode",
    ): _LOST,
    (
        "tiling_moe_finalize_routing_v2_arch35",
        "MoeFinalizeRoutingV2_arch35_invalid_drop_pad_mode",
    ): _LOST,
    (
        "tiling_moe_finalize_routing_v2_arch35",
        "MoeFinalizeRoutingV2_arch35_kh_full_load_small_k",
    ): "950's tiling takes more indices than rows without drop/pad, but GE's infershape rejects "
    "them before",
    (
        "tiling_moe_finalize_routing_v2_grad",
        "MoeFinalizeRoutingV2GradTiling_20002_002",
    ): "a float expert_idx is no column of the IR",
    (
        "opapi_aclnn_moe_finalize_routing_v3",
        "Ascend910B2_moe_finalize_routing_v3_constant_expert",
    ): "the op's IR on A2 has no x, a1, a2, v",
}
