"""Cases of the init_routing family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {
    (
        "infershape_moe_init_routing_v3_infershape",
        "moe_init_routing_v3_infer_shape_04",
    ): "the attribute that is wrong was not extracted",
    (
        "tiling_moe_init_routing_v2",
        "moe_init_routing_v2_tiling_regbase_dropless",
    ): "a 1-D expert_idx and a negative active_num pass 950's tiling, but GE's infershape rejects "
    "both before it",
    (
        "tiling_moe_init_routing",
        "moe_init_routing_tiling_17",
    ): "an int32 x is no column of the IR; tiling does not look at the dtype",
    (
        "tiling_moe_init_routing",
        "moe_init_routing_tiling_23",
    ): "the attribute that is wrong was not extracted",
    (
        "kernel_ut_params",
        "122",
    ): "a range of 734 of 313 experts: the kernel does not look at expert_num",
}
