"""Cases of the products family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

_INFERSHAPE = "csv_grouped_matmul_infershape"

REASONS: dict[tuple[str, str], str] = {
    (_INFERSHAPE, "a8w4_dtype_only_bf16_success_910b"): "a float32 scale beside int8 x and int4 "
    "weight is no column of the IR; the inference of dtypes does not look at it",
    (_INFERSHAPE, "infershape_splitm_singlex_multiw_multiy_grouplist"): "the sizes of y depend on "
    "the values of group_list",
    (_INFERSHAPE, "infershape_splitk_singlex_multiw_multiy_transx"): "several y with split_item "
    "3: GE reads their number off the node",
}
