"""Cases of the products family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

_INFERSHAPE = "csv_grouped_matmul_infershape"
_FUNCTIONS = "csv_aclnn_grouped_matmul"

_RIGHT = "the test expects a failure of a call that its name and the page call right"
_UNCOMPARED = "the test compares no result, and the page takes no such call: "
_NO_SCALE = _UNCOMPARED + "a quantised weight has an antiquant_scale"
_ROWS_ONLY = _UNCOMPARED + "int8 by int8 is grouped by rows (group_type 0)"

REASONS: dict[tuple[str, str], str] = {
    (_INFERSHAPE, "a8w4_dtype_only_bf16_success_910b"): "a float32 scale beside int8 x and int4 "
    "weight is no column of the IR; the inference of dtypes does not look at it",
    (_INFERSHAPE, "infershape_splitm_singlex_multiw_multiy_grouplist"): "the sizes of y depend on "
    "the values of group_list",
    (_INFERSHAPE, "infershape_splitk_singlex_multiw_multiy_transx"): "several y with split_item "
    "3: GE reads their number off the node",
    (_FUNCTIONS, "base_quant_split_m_success"): _RIGHT,
    (_FUNCTIONS, "quant_split_m_with_pertoken_success"): _RIGHT,
    (_FUNCTIONS, "quant_split_m_with_bias_success"): _RIGHT,
    (_FUNCTIONS, "int8_splitk_case"): _ROWS_ONLY,
    (_FUNCTIONS, "splitm_group_type1_case"): _ROWS_ONLY,
    (_FUNCTIONS, "splitk_int8_uint64_scale_case"): _ROWS_ONLY,
    (_FUNCTIONS, "splitk_int8_pertoken_2d_case"): _ROWS_ONLY,
    (_FUNCTIONS, "quant_int8_nosplit_bf16"): _ROWS_ONLY,
    (_FUNCTIONS, "quant_int8_nosplit_int8"): _ROWS_ONLY,
    (_FUNCTIONS, "wq_a16w4_splitm_950"): _NO_SCALE,
    (_FUNCTIONS, "wq_a16f8_splitm_950"): _NO_SCALE,
    (_FUNCTIONS, "wq_a16w8_nosplit_950"): _NO_SCALE,
    (_FUNCTIONS, "wq_a16w8_nosplit_v4_group_tensor_950"): _NO_SCALE,
    (_FUNCTIONS, "wq_a16w4_nosplit_v5_group_tensor_950"): _NO_SCALE,
    (_FUNCTIONS, "a8w4"): _UNCOMPARED + "int8 by int4 has a bias",
    (_FUNCTIONS, "noquant_f16_nosplit_3d_950"): _UNCOMPARED + "x has 2 dimensions",
    (_FUNCTIONS, "wq950_v1_a16w8_nosplit_multilist"): "the first version of the function takes a "
    "group_list beside lists of x and weight, which the op does not",
    (_FUNCTIONS, "opapi_v2_splitm_singlex_multiw_multiy"): "the sizes of y depend on the values "
    "of group_list",
}
