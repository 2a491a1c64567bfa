"""The routers against PyTorch's softmax, sigmoid and topk, by hand, and against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graph import OpError, Soc, infer_shape, ops
from moe_graph.ops import find
from tests.ops.comparing import FLOATS, assert_same_bits, kernel_and_reference


def _logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_routing_is_softmax_and_topk(dtype: torch.dtype) -> None:
    x = _logits(9, 13).to(dtype)
    y, ids, row_idx = ops.moe_gating_top_k_softmax(x, k=4)
    values, indices = torch.softmax(x.float(), -1).topk(4)
    torch.testing.assert_close(y, values.to(dtype), rtol=0, atol=0)
    assert torch.equal(ids, indices.int())
    assert torch.equal(row_idx, torch.arange(36, dtype=torch.int32).view(4, 9).t())


def test_selection_before_the_softmax() -> None:
    x = _logits(9, 13)
    y, ids, result = ops.moe_gating_top_k_softmax(x, k=4, renorm=1)
    values, indices = x.topk(4)
    torch.testing.assert_close(y, torch.softmax(values, -1))
    assert torch.equal(ids, indices.int())
    assert result.shape == (0,)


def test_the_softmax_of_all_logits_on_request() -> None:
    x = _logits(2, 5).view(1, 2, 5)
    result = ops.moe_gating_top_k_softmax(x, k=2, output_softmax_result_flag=True)[2]
    torch.testing.assert_close(result, torch.softmax(x, -1))


def test_finished_rows_choose_no_expert() -> None:
    finished = torch.tensor([False, True])
    ids = ops.moe_gating_top_k_softmax(_logits(2, 5), finished, 2)[1]
    assert ids[1].tolist() == [5, 5]
    assert max(ids[0].tolist()) < 5


def test_equal_scores_keep_the_order_of_experts() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]])
    for ids in (
        ops.moe_gating_top_k_softmax(x, k=4)[1],
        ops.moe_gating_top_k(x, 4)[1],
    ):
        assert ids.tolist() == [[1, 2, 4, 0]]


def _deepseek(
    x: torch.Tensor, bias: torch.Tensor, k: int, groups: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing as DeepSeek-V3 publishes it, in plain PyTorch."""
    scores = x.sigmoid()
    choice = (scores + bias).view(len(x), groups, -1)
    best = choice.topk(2, -1).values.sum(-1).topk(kept).indices
    mask = torch.zeros(len(x), groups).scatter_(1, best, 1).bool().unsqueeze(-1)
    ids = choice.masked_fill(~mask, -torch.inf).flatten(1).topk(k).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def test_groups_and_bias_are_those_of_deepseek() -> None:
    x, bias = _logits(20, 32), _logits(1, 32, seed=1)[0]
    y, ids, out = ops.moe_gating_top_k(
        x,
        6,
        bias=bias,
        k_group=3,
        group_count=8,
        group_select_mode=1,
        norm_type=1,
        out_flag=True,
        routed_scaling_factor=2.5,
    )
    want, indices = _deepseek(x, bias, 6, 8, 3)
    assert torch.equal(ids, indices.int())
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(out, x.sigmoid())


def test_a_group_is_as_good_as_its_largest_score() -> None:
    x = torch.tensor([[9.0, 0.0, 5.0, 5.0, 1.0, 8.0]])
    ids = ops.moe_gating_top_k(x, 3, k_group=2, group_count=3)[1]
    assert ids.tolist() == [[0, 5, 4]]


def test_renorm_divides_and_scales() -> None:
    x = _logits(5, 8)
    y = ops.moe_gating_top_k(x, 3, renorm=1, routed_scaling_factor=2.0)[0]
    values = torch.softmax(x, -1).topk(3).values
    torch.testing.assert_close(y, 2 * values / values.sum(-1, keepdim=True))


def test_scores_are_the_square_root_of_softplus() -> None:
    x = torch.cat([_logits(3, 8) * 40, torch.tensor([[-torch.inf, -150, -90, 0, 20, 90, 1e38, 1]])])
    with ops.use_product(Soc.ASCEND950):
        out = ops.moe_gating_top_k(x, 2, norm_type=2, out_flag=True)[2]
    torch.testing.assert_close(out, torch.nn.functional.softplus(x.double()).sqrt().float())


def test_the_hash_table_chooses() -> None:
    x = _logits(3, 4)
    table = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    tokens = torch.tensor([1, 0, 1], dtype=torch.int64)
    y, ids, _ = ops.moe_gating_top_k(x, 2, input_ids=tokens, tid2eid=table, norm_type=1)
    assert ids.tolist() == [[3, 2], [0, 1], [3, 2]]
    chosen = x.sigmoid().gather(1, ids.long())
    torch.testing.assert_close(y, chosen / chosen.sum(1, keepdim=True))


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    tokens = draw(st.integers(0, 5))
    size, groups = draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 3]))
    experts = size * groups
    x = _logits(tokens, experts, draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        x = x.round()  # ties
    x = x.to(draw(st.sampled_from(FLOATS)))
    k = draw(st.integers(1, size))
    op = draw(st.sampled_from(["MoeGatingTopKSoftmax", "MoeGatingTopKSoftmaxV2", "MoeGatingTopK"]))
    if op == "MoeGatingTopK":
        bias = x.new_ones(experts).cumsum(0) / 8 if draw(st.booleans()) else None
        return (
            op,
            [x, bias],
            {
                "k": k,
                "k_group": draw(st.integers(1, groups)),
                "group_count": groups,
                "group_select_mode": draw(st.integers(0, 1)),
                "renorm": draw(st.integers(0, 1)),
                "norm_type": draw(st.integers(0, 1)),
                "out_flag": draw(st.booleans()),
                "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
            },
        )
    finished = torch.arange(tokens) % 2 == 0 if draw(st.booleans()) else None
    attrs: dict[str, Any] = {"k": k}
    if op.endswith("V2"):
        attrs |= {"renorm": draw(st.integers(0, 1)), "output_softmax_result_flag": True}
    return op, [x, finished], attrs


@settings(max_examples=200, deadline=None)
@given(calls())
def test_the_kernel_is_the_definition(call: tuple[str, list[Any], dict[str, Any]]) -> None:
    got, want = kernel_and_reference(*call)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def _exact_gradient(function: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    exact = x.double().requires_grad_()
    function(exact).backward(grad.double())
    assert exact.grad is not None
    return exact.grad.float()


@pytest.mark.parametrize("renorm", [None, 0, 1])
def test_the_gradient_of_softmax_routing(renorm: int | None) -> None:
    x, grad = _logits(6, 9).requires_grad_(), _logits(6, 3, seed=2)
    ops.moe_gating_top_k_softmax(x, k=3, renorm=renorm)[0].backward(grad)

    def exact(x: torch.Tensor) -> torch.Tensor:
        if renorm == 1:
            return torch.softmax(x.topk(3).values, -1)
        return torch.softmax(x, -1).topk(3).values

    torch.testing.assert_close(x.grad, _exact_gradient(exact, x.detach(), grad))


@pytest.mark.parametrize("norm_type", [0, 1, 2])
@pytest.mark.parametrize("renorm", [0, 1])
def test_the_gradient_of_a_router(norm_type: int, renorm: int) -> None:
    x, grad, bias = _logits(6, 9).requires_grad_(), _logits(6, 3, seed=2), _logits(1, 9, seed=3)[0]
    with ops.use_product(Soc.ASCEND950):
        y, ids, _ = ops.moe_gating_top_k(
            x, 3, bias=bias, renorm=renorm, norm_type=norm_type, routed_scaling_factor=1.5
        )
    y.backward(grad)

    def exact(x: torch.Tensor) -> torch.Tensor:
        scores = [torch.softmax(x, -1), x.sigmoid(), torch.nn.functional.softplus(x).sqrt()]
        chosen = scores[norm_type].gather(1, ids.long())
        if norm_type or renorm:
            chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
        return chosen * 1.5

    torch.testing.assert_close(x.grad, _exact_gradient(exact, x.detach(), grad))


@pytest.mark.parametrize("norm_type", [0, 1, 2])
def test_masked_experts_have_a_gradient_of_zero(norm_type: int) -> None:
    logits = [[1.0, 2.0, -150.0, -torch.inf], [0.5, -torch.inf, 3.0, -torch.inf]]
    x = torch.tensor(logits, requires_grad=True)
    with ops.use_product(Soc.ASCEND950):
        y, _, _ = ops.moe_gating_top_k(x, 2, norm_type=norm_type, renorm=1)
    y.backward(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert x.grad is not None
    masked = x.detach() < -100
    assert (x.grad[masked] == 0).all()
    assert (x.grad[~masked] != 0).all()
    assert x.grad.isfinite().all()


def test_the_gradient_of_the_scores_that_are_returned() -> None:
    x, grad = _logits(4, 6).requires_grad_(), _logits(4, 6, seed=2)
    ops.moe_gating_top_k(x, 2, norm_type=1, out_flag=True)[2].backward(grad)
    torch.testing.assert_close(x.grad, _exact_gradient(torch.sigmoid, x.detach(), grad))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_op_is_autograd_of_a_sigmoid_router(dtype: torch.dtype) -> None:
    x, grad = _logits(5, 8), _logits(5, 3, seed=2).to(dtype)
    ids = x.topk(3).indices.int()
    attrs = {"norm_type": 1, "routed_scaling_factor": 2.5}
    got, want = kernel_and_reference("MoeGatingTopKBackward", [x.sigmoid(), grad, ids], attrs)

    def exact(x: torch.Tensor) -> torch.Tensor:
        chosen = x.sigmoid().gather(1, ids.long())
        return chosen / chosen.sum(1, keepdim=True) * 2.5

    expected = _exact_gradient(exact, x, grad)
    for result in (got[0], want[0]):
        assert result is not None
        assert result.dtype is dtype
        torch.testing.assert_close(result, expected.to(dtype))


def test_finished_rows_have_no_gradient() -> None:
    x = _logits(2, 4).requires_grad_()
    y = ops.moe_gating_top_k_softmax(x, torch.tensor([True, False]), 2)[0]
    with pytest.raises(NotImplementedError, match="finished"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"k": 0}, "k"),
        ({"k": 7}, "k"),
        ({"group_count": 4}, "group_count"),
        ({"group_count": 0}, "group_count"),
        ({"group_count": 6, "group_select_mode": 1}, "group_count"),
        ({"group_count": 2, "k_group": 3}, "k_group"),
        ({"group_count": 2, "k": 4}, "k"),
        ({"norm_type": 2}, "norm_type"),
        ({"renorm": 2}, "renorm"),
        ({"group_select_mode": 2}, "group_select_mode"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"bias": torch.zeros(6).half()}, "bias"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "tid2eid"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(OpError) as raised:
        ops.moe_gating_top_k(_logits(3, 6), **({"k": 1} | arguments))
    assert raised.value.op == "MoeGatingTopK"
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("x", "arguments", "argument"),
    [
        (torch.zeros(3), {}, "x"),
        (torch.zeros(2, 4), {"k": 5}, "k"),
        (torch.zeros(2, 4), {"k": 1025}, "k"),
        (torch.zeros(2, 4), {"renorm": 2}, "renorm"),
        (torch.zeros(2, 4), {"finished": torch.zeros(3, dtype=torch.bool)}, "finished"),
    ],
)
def test_errors_of_softmax_routing(
    x: torch.Tensor, arguments: dict[str, Any], argument: str
) -> None:
    with pytest.raises(OpError) as raised:
        ops.moe_gating_top_k_softmax(x, **({"k": 1} | arguments))
    assert raised.value.argument == argument


def test_experts_are_limited_per_product() -> None:
    x = torch.zeros(1, 2049)
    with pytest.raises(OpError, match="2048"):
        ops.moe_gating_top_k(x, 1)
    ops.moe_gating_top_k_softmax(x, k=1)
    with ops.use_product(Soc.ASCEND950), pytest.raises(OpError, match="2048"):
        ops.moe_gating_top_k_softmax(x, k=1)


def test_unknown_and_symbolic_sizes() -> None:
    tokens = sympy.Symbol("T", integer=True, positive=True)
    for op, last in (("MoeGatingTopK", (tokens, 16)), ("MoeGatingTopKSoftmax", (tokens, 2))):
        assert infer_shape(op, [([tokens, 16], "float16")], {"k": 2})[2] == last
        assert infer_shape(op, [([-1, 16], "float16")], {"k": 2})[0] == (-1, 2)
    assert infer_shape("MoeGatingTopKSoftmax", [([-2], "float16")], {"k": 2})[0] == (-2,)


@pytest.mark.parametrize("name", ["moe_gating_top_k_softmax", "moe_gating_top_k_softmax_v2"])
def test_opcheck(name: str) -> None:
    x = _logits(4, 6).requires_grad_()
    torch.library.opcheck(getattr(torch.ops.moe_graph, name), (x, None, 2))


def test_opcheck_of_the_router() -> None:
    x = _logits(4, 6).requires_grad_()
    arguments = {"norm_type": 1, "out_flag": True}
    torch.library.opcheck(torch.ops.moe_graph.moe_gating_top_k, (x, None, None, None, 2), arguments)


def test_every_op_of_the_family_is_here() -> None:
    for name in ("Softmax", "SoftmaxV2", "", "Backward"):
        assert find(f"MoeGatingTopK{name}") is not None
