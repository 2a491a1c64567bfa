"""Dispatch and combine: shapes, dtypes and limits; rows are not exchanged here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_graph import OpError, Soc, infer_shape, ops

GROUP = {"group_ep": "ep", "ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 64}
V2 = "MoeDistributeDispatchV2"


def _dispatch(attrs: dict[str, Any], soc: str = "A2", scaled: bool = False) -> Any:
    inputs: list[Any] = [([8, 7168], "bfloat16"), ([8, 6], "int32")]
    if scaled:
        inputs += [None, None, ([8, 6], "float32")]
    return infer_shape(V2, inputs, GROUP | attrs, soc)


def test_a_rank_reserves_rows_for_all_tokens_of_all_ranks() -> None:
    shapes = _dispatch({})
    rows = 8 * 16 * 4  # 4 experts a rank, fewer than K
    assert shapes == [(rows, 7168), (rows,), (rows * 128,), (4,), (16 * 4,), (0,), (0,)]


def test_fewer_choices_than_local_experts() -> None:
    inputs = [([8, 7168], "bfloat16"), ([8, 2], "int32")]
    assert infer_shape(V2, inputs, GROUP)[0] == (8 * 16 * 2, 7168)


def test_a_rank_of_a_shared_expert_serves_its_share_of_the_ranks() -> None:
    attrs = {"shared_expert_num": 1, "shared_expert_rank_num": 4, "moe_expert_num": 48}
    shapes = _dispatch(attrs, "A3")
    assert shapes[0] == (8 * 4, 7168)  # 16 ranks over 4 copies
    assert shapes[3] == (1,)
    shapes = _dispatch(attrs | {"ep_rank_id": 4}, "A3")
    assert shapes[0] == (8 * 16 * 4, 7168)


@pytest.mark.parametrize(
    ("soc", "world", "more"),
    [("A2", 16, 128 * 2 * 6 * 2), ("A3", 16, 128 * 2 * 6 * 16 // 8), ("950", 16, 0)],
)
def test_counts_for_the_layered_reduction(soc: str, world: int, more: int) -> None:
    shapes = _dispatch({"ep_world_size": world}, soc, scaled=True)
    assert shapes[4] == (world * 4 + more,)
    assert shapes[6] == shapes[1]


def test_the_products_round_differently() -> None:
    attrs = {"ep_world_size": 12, "moe_expert_num": 48}
    global_bs = 8 * 12
    assert _dispatch(attrs, "A2", scaled=True)[4] == (48 + global_bs * 2 * 6 * 1,)
    assert _dispatch(attrs, "A3", scaled=True)[4] == (48 + global_bs * 2 * 6 * 12 // 8,)


def test_rows_are_bounds_and_quantised_rows_int8() -> None:
    opdef = ops.find(V2)
    assert opdef is not None
    inputs = [
        ops.TensorSpec((8, 7168), torch.bfloat16),
        ops.TensorSpec((8, 6), torch.int32),
    ]
    specs = opdef.infer(inputs, opdef.bind_attrs(GROUP | {"quant_mode": 2}))
    assert specs[0] is not None
    assert specs[1] is not None
    assert specs[0].dtype is torch.int8
    assert specs[0].bounds == specs[1].bounds == (0,)


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(OpError, match="known dimensions"):
        infer_shape(V2, [([-1, 7168], "bfloat16"), ([-1, 6], "int32")], GROUP)


def _call(
    tokens: int = 8, hidden: int = 7168, top_k: int = 6, **attrs: Any
) -> tuple[torch.Tensor, ...]:
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    group = GROUP | attrs
    return ops.moe_distribute_dispatch_v2(
        x,
        ids,
        group.pop("group_ep"),
        group.pop("ep_world_size"),
        group.pop("ep_rank_id"),
        group.pop("moe_expert_num"),
        **group,
    )


@pytest.mark.parametrize(
    ("soc", "call", "argument"),
    [
        ("A2", {"tokens": 257}, "expert_ids"),
        ("A3", {"tokens": 513}, "expert_ids"),
        ("A2", {"hidden": 7169}, "x"),
        ("A3", {"hidden": 512}, "x"),
        ("A2", {"hidden": 10272}, "x"),
        ("A2", {"top_k": 17}, "expert_ids"),
        ("A2", {"ep_world_size": 512, "moe_expert_num": 512}, "ep_world_size"),
        ("A3", {"ep_world_size": 1}, "ep_world_size"),
        ("A2", {"moe_expert_num": 63}, "moe_expert_num"),
        ("A2", {"moe_expert_num": 2048}, "moe_expert_num"),
        ("A2", {"ep_rank_id": 16}, "ep_rank_id"),
        ("A2", {"tp_world_size": 2}, "tp_world_size"),
        ("A2", {"quant_mode": 1}, "quant_mode"),
        ("A2", {"comm_alg": "ring"}, "comm_alg"),
        ("A2", {"group_ep": ""}, "group_ep"),
        ("A2", {"group_ep": "e" * 128}, "group_ep"),
        ("A3", {"group_tp": "t" * 128}, "group_tp"),
        ("A3", {"expert_shard_type": 1}, "expert_shard_type"),
        ("A3", {"global_bs": 17}, "global_bs"),
        ("A2", {"expert_token_nums_type": 2}, "expert_token_nums_type"),
        ("A2", {"shared_expert_rank_num": 1, "moe_expert_num": 60}, "shared_expert_rank_num"),
    ],
)
def test_errors_name_the_argument(soc: str, call: dict[str, Any], argument: str) -> None:
    with ops.use_product(Soc.parse(soc)), pytest.raises(OpError) as raised:
        _call(**call)
    assert raised.value.op == V2
    assert raised.value.argument == argument


def test_the_first_version_keeps_the_older_limits() -> None:
    opdef = ops.find("MoeDistributeDispatch")
    assert opdef is not None
    inputs = [ops.TensorSpec((8, 4096), torch.bfloat16), ops.TensorSpec((8, 6), torch.int32)]
    opdef.infer(inputs, opdef.bind_attrs(GROUP), Soc.A2)
    with pytest.raises(OpError, match="H = 4096, want one of 7168 on A3"):
        opdef.infer(inputs, opdef.bind_attrs(GROUP), Soc.A3)


@pytest.mark.parametrize("soc", list(Soc))
def test_the_third_version_has_a_context_for_the_names_of_groups(soc: Soc) -> None:
    second, third = ops.find(V2), ops.find("MoeDistributeDispatchV3")
    assert second is not None
    assert third is not None
    inputs = [ops.TensorSpec((8, 7168), torch.bfloat16), ops.TensorSpec((8, 6), torch.int32)]
    context = ops.TensorSpec((1, 2052), torch.int32)
    group = {name: value for name, value in GROUP.items() if name != "group_ep"}
    attrs = third.bind_attrs(group | {"ccl_buffer_size": 0})
    if soc is Soc.A2:
        with pytest.raises(OpError, match="an op of A2"):
            third.infer([context, *inputs], attrs, soc)
        return
    got = third.infer([context, *inputs], attrs, soc)
    assert got == second.infer(inputs, second.bind_attrs(GROUP), soc)
    with pytest.raises(OpError, match="context"):
        third.infer([None, *inputs], attrs, soc)


def test_the_first_version_reserves_the_mask() -> None:
    opdef = ops.find("MoeDistributeDispatch")
    assert opdef is not None
    x, ids = ops.TensorSpec((8, 7168), torch.bfloat16), ops.TensorSpec((8, 6), torch.int32)
    mask = ops.TensorSpec((8,), torch.bool)
    for soc in Soc:
        with pytest.raises(OpError, match="x_active_mask"):
            opdef.infer([x, ids, None, mask], opdef.bind_attrs(GROUP), soc)


def test_four_ranks_are_enough_for_the_first_version_on_950_alone() -> None:
    opdef = ops.find("MoeDistributeDispatch")
    assert opdef is not None
    inputs = [ops.TensorSpec((8, 7168), torch.bfloat16), ops.TensorSpec((8, 6), torch.int32)]
    attrs = opdef.bind_attrs(GROUP | {"ep_world_size": 4})
    opdef.infer(inputs, attrs, Soc.ASCEND950)
    with pytest.raises(OpError, match="ep = 4"):
        opdef.infer(inputs, attrs, Soc.A3)


def test_scales_that_a_call_does_not_use_may_be_allocated_in_any_way() -> None:
    opdef = ops.find("MoeDistributeDispatch")
    assert opdef is not None
    inputs = [ops.TensorSpec((8, 7168), torch.bfloat16), ops.TensorSpec((8, 6), torch.int32)]
    for quant_mode, accepted in ((0, True), (2, False)):
        attrs = opdef.bind_attrs(GROUP | {"quant_mode": quant_mode})
        outputs = opdef.infer(inputs, attrs, Soc.A3)
        outputs[1] = ops.TensorSpec((1,), torch.float16)
        if accepted:
            opdef.infer(inputs, attrs, Soc.A3, outputs=outputs)
            continue
        with pytest.raises(OpError, match="dynamic_scales"):
            opdef.infer(inputs, attrs, Soc.A3, outputs=outputs)


def test_running_says_that_rows_are_not_exchanged() -> None:
    with pytest.raises(NotImplementedError, match="between ranks"):
        _call()


def test_combine_returns_the_tokens() -> None:
    inputs = [
        ([512, 7168], "bfloat16"),
        ([8, 6], "int32"),
        ([512 * 128], "int32"),
        ([64], "int32"),
        ([8, 6], "float32"),
    ]
    assert infer_shape("MoeDistributeCombineV2", inputs, GROUP) == [(8, 7168)]


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"scales": (8, 5)}, "expert_scales"),
        ({"rows": 100}, "expand_x"),
        ({"counts": 63}, "ep_send_counts"),
        ({"attrs": {"comm_quant_mode": 1}}, "comm_quant_mode"),
        ({"attrs": {"out_dtype": 1}}, "out_dtype"),
        ({"attrs": {"copy_expert_num": 1}}, "ori_x"),
    ],
)
def test_combine_checks_what_dispatch_returned(changes: dict[str, Any], argument: str) -> None:
    opdef = ops.find("MoeDistributeCombineV2")
    assert opdef is not None
    inputs = [
        ops.TensorSpec((changes.get("rows", 512), 7168), torch.bfloat16),
        ops.TensorSpec((8, 6), torch.int32),
        ops.TensorSpec((512 * 128,), torch.int32),
        ops.TensorSpec((changes.get("counts", 64),), torch.int32),
        ops.TensorSpec(changes.get("scales", (8, 6)), torch.float32),
    ]
    attrs = opdef.bind_attrs(GROUP | changes.get("attrs", {}))
    with pytest.raises(OpError) as raised:
        opdef.infer(inputs, attrs, Soc.A3)
    assert raised.value.argument == argument


@pytest.mark.parametrize("mode", [3, 4])
@pytest.mark.parametrize(
    ("op", "soc", "accepted"),
    [
        ("MoeDistributeCombineV2", Soc.ASCEND950, True),
        ("MoeDistributeCombineV2", Soc.A3, False),
        ("MoeDistributeCombine", Soc.ASCEND950, False),
    ],
)
def test_only_950_sends_mx_rows_back(op: str, soc: Soc, accepted: bool, mode: int) -> None:
    opdef = ops.find(op)
    assert opdef is not None
    inputs = [
        ops.TensorSpec((512, 7168), torch.bfloat16),
        ops.TensorSpec((8, 6), torch.int32),
        ops.TensorSpec((512 * 128,), torch.int32),
        ops.TensorSpec((64,), torch.int32),
        ops.TensorSpec((8, 6), torch.float32),
    ]
    attrs = opdef.bind_attrs(GROUP | {"comm_quant_mode": mode})
    if accepted:
        opdef.infer(inputs, attrs, soc)
        return
    with pytest.raises(OpError, match="comm_quant_mode"):
        opdef.infer(inputs, attrs, soc)


def test_a_graph_gets_shapes_without_running() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        outputs = _call()
    assert outputs[0].shape == (512, 7168)
    assert outputs[3].dtype is torch.int64
