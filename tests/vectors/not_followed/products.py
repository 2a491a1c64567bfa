"""Cases of the products family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

_INFERSHAPE = "csv_grouped_matmul_infershape"

REASONS: dict[tuple[str, str], str] = {
    (_INFERSHAPE, "grouped_matmul_infershape_0"): "bias float beside x float16: the IR and the "
    "aclnn table want float16, infershape does not look",
    (_INFERSHAPE, "nonquant_dtype_only_fp16_success_910b"): "a dtype-only case: it gives a "
    "group_list to group_type -1, which the shape rules reject",
    (_INFERSHAPE, "infershape_splitm_singlex_multiw_multiy_grouplist"): "the sizes of y depend on "
    "the values of group_list",
    (_INFERSHAPE, "infershape_splitk_singlex_multiw_multiy_transx"): "several y with split_item "
    "3: GE reads their number off the node",
}
