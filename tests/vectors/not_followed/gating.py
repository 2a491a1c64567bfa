"""Cases of the gating family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {
    (
        "tiling_moe_gating_top_k_arch35",
        "moe_gating_top_k_tiling_arch35_fail_02_invalid_k_exceed_expert",
    ): "k = 33 of 4 groups of 32 experts is within the documented limits",
    (
        "tiling_moe_gating_top_k_arch35",
        "moe_gating_top_k_tiling_arch35_fail_11_k_exceed_kgroup_times_groupexpert",
    ): "k = 8 of 2 groups of 8 experts is within the documented limits",
    (
        "tiling_moe_gating_top_k_backward",
        "moe_gating_top_k_backward_tiling_fail_ub_space_01",
    ): "how much on-chip memory the op needs is not documented",
}
