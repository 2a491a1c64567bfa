"""Cases of the token_permute family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {
    (
        "infershape_moe_token_permute_with_ep_infershape",
        "MoeTokenPermuteWithEp_infershape_range_start_ge_end",
    ): "the value of range was not extracted; 2 rows of 6 copies follow from any (n, n - 4)",
    (
        "opapi_aclnn_moe_token_unpermute_grad",
        "Ascend950_moe_token_unpermute_grad_with_probs_fp16",
    ): "the page wants probs of 2 dimensions, the case has one",
    (
        "opapi_aclnn_moe_token_unpermute_grad",
        "Ascend950_moe_token_unpermute_grad_permute_tokens_nullptr",
    ): "permuted_tokens is optional in the IR, and without probs nothing reads it",
    (
        "opapi_aclnn_moe_token_unpermute_grad",
        "Ascend950_moe_token_unpermute_grad_probs_grad_out_dtype_invalid",
    ): "without probs there is no gradient of them, so that its dtype does not matter",
}
