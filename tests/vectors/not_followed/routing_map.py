"""Cases of the routing_map family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

_NO_COLUMN = "no column of the IR; tiling does not look at the dtype"

REASONS: dict[tuple[str, str], str] = {
    (
        "opapi_aclnn_moe_token_permute_with_routing_map",
        "Ascend910B2_moe_token_permute_with_routing_map_pad_mix",
    ): "the case expects nothing; float32 probs beside float16 tokens are no column of the IR, and "
    "the page excludes them",
    (
        "opapi_aclnn_moe_token_unpermute_with_routing_map",
        "Ascend910B2_moe_token_unpermute_with_routingmap_invalid_routing_map_dtype",
    ): "an int32 map is no column of the IR: the function warns and would read it as int8",
    (
        "opapi_aclnn_moe_token_unpermute_with_routing_map",
        "Ascend910B2_moe_token_unpermute_with_routingmap_restore_shape_invalid_size",
    ): "the attribute that is wrong was not extracted",
    (
        "tiling_moe_token_permute_with_routing_map",
        "MoeTokenPermuteWithRoutingMap_tiling_zero_token",
    ): "the page takes empty tensors: the function answers them before tiling, as the op does here",
    (
        "tiling_moe_token_permute_with_routing_map",
        "MoeTokenPermuteWithRoutingMap_tiling_with_prob_int64",
    ): f"int64 probs are {_NO_COLUMN}",
    (
        "tiling_moe_token_permute_with_routing_map",
        "MoeTokenPermuteWithRoutingMap_tiling_with_prob_int8",
    ): f"int8 probs are {_NO_COLUMN}",
    (
        "tiling_moe_token_unpermute_with_routing_map",
        "test_tiling_indices_int64_dtype",
    ): f"int64 indices are {_NO_COLUMN}",
    (
        "tiling_moe_token_unpermute_with_routing_map_grad",
        "test_tiling_int64_unpermuted_dtype",
    ): f"an int64 gradient is {_NO_COLUMN}",
    (
        "tiling_moe_token_unpermute_with_routing_map_grad",
        "test_tiling_double_unpermuted_dtype",
    ): f"a float64 gradient is {_NO_COLUMN}",
}
