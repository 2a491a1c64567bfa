"""How callers of infer_shape may spell dtypes, products and inputs."""

from __future__ import annotations

import pytest
import torch

from moe_graph import OpError, Soc, infer_shape

X, IDS = [4, 8], ([4, 2], "int32")
ATTRS = {"expert_num": 4}


@pytest.mark.parametrize(
    "name", [torch.float16, "float16", "FLOAT16", "DT_FLOAT16", "fp16", "bf16", "DT_BF16", "FLOAT"]
)
def test_dtypes_by_any_of_their_names(name: torch.dtype | str) -> None:
    assert infer_shape("MoeInitRoutingV2", [(X, name), IDS], ATTRS)[0] == (8, 8)


@pytest.mark.parametrize("name", ["HIFLOAT8", "DT_", "Tensor"])
def test_a_name_of_no_dtype_is_an_error(name: str) -> None:
    with pytest.raises(OpError) as raised:
        infer_shape("MoeInitRoutingV2", [(X, name), IDS], ATTRS)
    assert raised.value.op == "MoeInitRoutingV2"


@pytest.mark.parametrize(
    ("name", "soc"), [("Ascend910B3", Soc.A2), ("Ascend910_9391", Soc.A3), ("Ascend950", "950")]
)
def test_products_by_the_names_of_devices(name: str, soc: Soc | str) -> None:
    group = {"ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 64}
    attrs = {"group_ep": "ep", **group}
    inputs = [([8, 7168], "bf16"), ([8, 6], "int32"), None, None, ([8, 6], "float")]
    shapes = infer_shape("MoeDistributeDispatchV2", inputs, attrs, name)
    assert shapes == infer_shape("MoeDistributeDispatchV2", inputs, attrs, soc)
    with pytest.raises(ValueError, match="unsupported product"):
        infer_shape("MoeDistributeDispatchV2", inputs, attrs, "Ascend310P")


def test_the_only_tensor_of_a_list_needs_no_list() -> None:
    x, weight, group_list = ([6, 8], "bf16"), ([3, 8, 5], "bf16"), ([3], "int64")
    attrs = {"splitItem": 3, "groupType": 0}
    alone = [x, weight, None, None, None, None, None, group_list]
    listed = [[x], [weight], [], [], [], [], [], group_list]
    assert infer_shape("GroupedMatmul", alone, attrs) == [(6, 5)]
    assert infer_shape("GroupedMatmul", listed, attrs) == [(6, 5)]
