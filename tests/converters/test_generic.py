"""Every op of moe_graph through TorchAir: torch op, converter, GE node, engine, against eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchair

import moe_graph  # noqa: F401  (loads the emulated CANN before torch)
from moe_graph.config import Soc
from moe_graph.converters import register_converters
from moe_graph.emulator.engine import session
from moe_graph.ops import all_opdefs, find, use_product
from moe_graph.ops.torch_binding import torch_name

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 6, 5
_HELD = [2, 7]  # the places of the five rows that a rank holds
_ops = torch.ops.moe_graph

Inputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _converters() -> None:
    register_converters()
    torch._dynamo.reset()


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, EXPERTS, (tokens, TOP_K), dtype=torch.int32)


def _row_idx(tokens: int) -> torch.Tensor:
    return torch.randperm(tokens * TOP_K).to(torch.int32)


def _ends(rows: int) -> torch.Tensor:
    return torch.tensor([rows // 3, rows // 3, rows // 2, rows])


def _map(n: int) -> torch.Tensor:
    """A routing map that sends every token everywhere."""
    return torch.ones((n, EXPERTS), dtype=torch.bool)


def _init_routing(x: torch.Tensor, ids: torch.Tensor) -> Any:
    expanded, row_idx, cumsum, _ = _ops.moe_init_routing_v2(
        x, ids, expert_num=EXPERTS, expert_tokens_count_or_cumsum_flag=1
    )
    return expanded, row_idx, cumsum


def _init_routing_drop_pad(x: torch.Tensor, ids: torch.Tensor) -> Any:
    expanded, row_idx, _, before = _ops.moe_init_routing_v2(
        x,
        ids,
        expert_capacity=2,
        expert_num=EXPERTS,
        drop_pad_mode=1,
        expert_tokens_before_capacity_flag=True,
    )
    return expanded, row_idx, before


def _finalize(rows: torch.Tensor, row_idx: torch.Tensor, x1: torch.Tensor, s: torch.Tensor) -> Any:
    return _ops.moe_finalize_routing_v2(rows, row_idx, x1, None, None, s, None, drop_pad_mode=2)


def _unpermute_with_ep_grad(*inputs: torch.Tensor) -> Any:
    rows_grad, probs_grad = _ops.moe_token_unpermute_with_ep_grad(
        *inputs, range=_HELD, topk_num=TOP_K
    )
    return rows_grad[:5], probs_grad


def _grouped_list(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:
    return _ops.grouped_matmul(
        [x], [weight], [], [], [], [], [], ends, None, split_item=2, group_type=0
    )[0]


def _grouped_pairs(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return _ops.grouped_matmul([x, y], [w, v], [], [], [], [], [])


CASES: dict[str, tuple[str, Callable[..., Any], Callable[[int], Inputs]]] = {
    "init_routing": (
        "MoeInitRoutingV2",
        _init_routing,
        lambda n: (_randn(n, HIDDEN), _ids(n)),
    ),
    "init_routing_drop_pad": (
        "MoeInitRoutingV2",
        _init_routing_drop_pad,
        lambda n: (_randn(n, HIDDEN), _ids(n)),
    ),
    "init_routing_grad": (
        "MoeInitRoutingV2Grad",
        lambda grad, row_idx: _ops.moe_init_routing_v2_grad(grad, row_idx, TOP_K),
        lambda n: (_randn(n * TOP_K, HIDDEN), _row_idx(n)),
    ),
    "finalize_routing_v1": (
        "MoeFinalizeRouting",
        lambda *inputs: _ops.moe_finalize_routing(*inputs[:2], None, *inputs[2:]),
        lambda n: (
            _randn(n * TOP_K, HIDDEN),
            _randn(n, HIDDEN),
            _randn(EXPERTS, HIDDEN),
            _randn(n, TOP_K),
            _row_idx(n),
            _ids(n),
        ),
    ),
    "finalize_routing": (
        "MoeFinalizeRoutingV2",
        _finalize,
        lambda n: (
            _randn(n * TOP_K, HIDDEN),
            _row_idx(n),
            _randn(n, HIDDEN),
            _randn(n, TOP_K),
        ),
    ),
    "finalize_routing_mixed": (
        "MoeFinalizeRoutingV2",
        _finalize,
        lambda n: (
            _randn(n * TOP_K, HIDDEN, dtype=torch.bfloat16),
            _row_idx(n),
            _randn(n, HIDDEN, dtype=torch.bfloat16),
            _randn(n, TOP_K),
        ),
    ),
    "finalize_routing_grad": (
        "MoeFinalizeRoutingV2Grad",
        lambda *inputs: _ops.moe_finalize_routing_v2_grad(*inputs),
        lambda n: (
            _randn(n, HIDDEN),
            _row_idx(n),
            _randn(n * TOP_K, HIDDEN),
            _randn(n, TOP_K),
        ),
    ),
    "init_routing_first_version": (
        "MoeInitRouting",
        lambda x, numbers, ids: _ops.moe_init_routing(x, numbers, ids, 5),
        lambda n: (_randn(n, HIDDEN), _row_idx(n).view(n, TOP_K), _ids(n)),
    ),
    "init_routing_quant": (
        "MoeInitRoutingQuant",
        lambda x, numbers, ids: _ops.moe_init_routing_quant(x, numbers, ids, 5, 9.5, 0.5),
        lambda n: (_randn(n, HIDDEN), _row_idx(n).view(n, TOP_K), _ids(n)),
    ),
    "init_routing_quant_v2": (
        "MoeInitRoutingQuantV2",
        lambda x, ids, scale: _ops.moe_init_routing_quant_v2(
            x, ids, scale, None, expert_num=EXPERTS, quant_mode=1
        )[::4],
        lambda n: (_randn(n, HIDDEN), _ids(n), torch.rand(1, HIDDEN)),
    ),
    "init_routing_v3": (
        "MoeInitRoutingV3",
        lambda x, ids, scale: _ops.moe_init_routing_v3(
            x, ids, scale, expert_num=EXPERTS, expert_tokens_num_flag=True, expert_tokens_num_type=1
        ),
        lambda n: (_randn(n, HIDDEN), _ids(n), _randn(n)),
    ),
    "init_routing_v3_dynamic_int8": (
        "MoeInitRoutingV3",
        lambda x, ids, scale: _ops.moe_init_routing_v3(
            x, ids, scale, expert_num=EXPERTS, quant_mode=1
        )[::3],
        lambda n: (_randn(n, HIDDEN), _ids(n), torch.rand(EXPERTS, HIDDEN)),
    ),
    "token_permute": (
        "MoeTokenPermute",
        lambda x, ids: _ops.moe_token_permute(x, ids, -3),
        lambda n: (_randn(n, HIDDEN), _ids(n)),
    ),
    "token_permute_grad": (
        "MoeTokenPermuteGrad",
        lambda grad, row_idx: _ops.moe_token_permute_grad(grad, row_idx, TOP_K),
        lambda n: (_randn(n * TOP_K, HIDDEN), _row_idx(n)),
    ),
    "token_unpermute": (
        "MoeTokenUnpermute",
        lambda *inputs: _ops.moe_token_unpermute(*inputs),
        lambda n: (
            _randn(n * TOP_K - 3, HIDDEN, dtype=torch.bfloat16),
            _row_idx(n),
            _randn(n, TOP_K),
        ),
    ),
    "token_unpermute_grad": (
        "MoeTokenUnpermuteGrad",
        lambda *inputs: _ops.moe_token_unpermute_grad(*inputs),
        lambda n: (
            _randn(n * TOP_K, HIDDEN, dtype=torch.bfloat16),
            _randn(n, HIDDEN, dtype=torch.bfloat16),
            _row_idx(n),
            _randn(n, TOP_K),
        ),
    ),
    "token_permute_with_ep": (
        "MoeTokenPermuteWithEp",
        lambda *inputs: _ops.moe_token_permute_with_ep(*inputs, _HELD),
        lambda n: (_randn(n, HIDDEN), _ids(n), _randn(n, TOP_K)),
    ),
    "token_permute_with_ep_grad": (
        "MoeTokenPermuteWithEpGrad",
        lambda *inputs: _ops.moe_token_permute_with_ep_grad(*inputs, TOP_K, _HELD),
        lambda n: (_randn(5, HIDDEN), _row_idx(n), _randn(5)),
    ),
    "token_unpermute_with_ep": (
        "MoeTokenUnpermuteWithEp",
        lambda *inputs: _ops.moe_token_unpermute_with_ep(*inputs, TOP_K, _HELD),
        lambda n: (_randn(5, HIDDEN), _row_idx(n), _randn(n, TOP_K)),
    ),
    "token_unpermute_with_ep_grad": (
        "MoeTokenUnpermuteWithEpGrad",
        _unpermute_with_ep_grad,
        lambda n: (_randn(n, HIDDEN), _row_idx(n), _randn(5, HIDDEN), _randn(n, TOP_K)),
    ),
    "permute_with_routing_map": (
        "MoeTokenPermuteWithRoutingMap",
        lambda x, mask, probs: _ops.moe_token_permute_with_routing_map(
            x, mask, probs, 2 * EXPERTS, True
        ),
        lambda n: (_randn(n, HIDDEN), _map(n).t().contiguous(), _randn(EXPERTS, n)),
    ),
    "permute_with_routing_map_grad": (
        "MoeTokenPermuteWithRoutingMapGrad",
        lambda grad, of_probs, token_of_row: _ops.moe_token_permute_with_routing_map_grad(
            grad, of_probs, token_of_row, None, EXPERTS, 2, True
        ),
        lambda n: (
            _randn(n * EXPERTS, HIDDEN),
            _randn(n * EXPERTS),
            torch.arange(n * EXPERTS, dtype=torch.int32) % 2,
        ),
    ),
    "unpermute_with_routing_map": (
        "MoeTokenUnpermuteWithRoutingMap",
        lambda rows, slots, mask, probs: _ops.moe_token_unpermute_with_routing_map(
            rows, slots, mask, probs
        )[0],
        lambda n: (
            _randn(n * EXPERTS, HIDDEN),
            torch.arange(n * EXPERTS, dtype=torch.int32),
            _map(n),
            _randn(n, EXPERTS),
        ),
    ),
    "unpermute_with_routing_map_grad": (
        "MoeTokenUnpermuteWithRoutingMapGrad",
        lambda *inputs: _ops.moe_token_unpermute_with_routing_map_grad(*inputs),
        lambda n: (
            _randn(n, HIDDEN),
            *[torch.arange(n * EXPERTS, dtype=torch.int32)] * 2,
            _map(n),
            _randn(n * EXPERTS, HIDDEN),
            _randn(n, EXPERTS),
        ),
    ),
    "grouped_matmul_single": (
        "GroupedMatmul",
        lambda x, w, b, ends: _ops.grouped_matmul_single(x, w, b, ends),
        lambda n: (
            _randn(n, HIDDEN),
            _randn(EXPERTS, HIDDEN, INNER),
            _randn(EXPERTS, INNER),
            _ends(n),
        ),
    ),
    "grouped_matmul_inner": (
        "GroupedMatmul",
        lambda x, w, ends: _ops.grouped_matmul_single(
            x, w, None, ends, transpose_x=True, group_type=2
        ),
        lambda n: (_randn(n, HIDDEN), _randn(n, INNER), _ends(n)),
    ),
    "grouped_matmul_one": (
        "GroupedMatmul",
        _grouped_list,
        lambda n: (_randn(n, HIDDEN), _randn(EXPERTS, HIDDEN, INNER), _ends(n)),
    ),
    "grouped_matmul_pairs": (
        "GroupedMatmul",
        _grouped_pairs,
        lambda n: (_randn(n, 3), _randn(n, 4), _randn(3, 5), _randn(4, 9)),
    ),
    "gating_softmax": (
        "MoeGatingTopKSoftmax",
        lambda x: _ops.moe_gating_top_k_softmax(x, None, TOP_K),
        lambda n: (_randn(n, EXPERTS),),
    ),
    "gating_softmax_v2": (
        "MoeGatingTopKSoftmaxV2",
        lambda x: _ops.moe_gating_top_k_softmax_v2(x, None, TOP_K, 0, True),
        lambda n: (_randn(n, EXPERTS),),
    ),
    "gating_groups": (
        "MoeGatingTopK",
        lambda x, bias: _ops.moe_gating_top_k(
            x, bias, None, None, 1, group_count=2, norm_type=1, out_flag=True
        ),
        lambda n: (_randn(n, EXPERTS), _randn(EXPERTS)),
    ),
    "gating_backward": (
        "MoeGatingTopKBackward",
        lambda *inputs: _ops.moe_gating_top_k_backward(*inputs, norm_type=1),
        lambda n: (torch.rand(n, EXPERTS), _randn(n, TOP_K), _ids(n)),
    ),
    "compute_expert_tokens": (
        "MoeComputeExpertTokens",
        lambda ids: _ops.moe_compute_expert_tokens(ids, EXPERTS),
        lambda n: (_ids(n).reshape(-1).sort().values,),
    ),
    "re_routing": (
        "MoeReRouting",
        lambda rows, counts, scales: _ops.moe_re_routing(rows, counts, scales),
        lambda n: (
            _randn(n, HIDDEN, dtype=torch.float16),
            torch.tensor([[1, 0, 2], [0, n - 4, 1]]),
            _randn(n),
        ),
    ),
    "update_expert": (
        "MoeUpdateExpert",
        lambda ids, table: _ops.moe_update_expert(ids, table, None, None, None, 0, 8)[0],
        lambda n: (
            _ids(n),
            torch.tensor([[1, expert, 0] for expert in range(EXPERTS)], dtype=torch.int32),
        ),
    ),
    "swi_glu": ("SwiGlu", lambda x: _ops.swi_glu(x), lambda n: (_randn(n, HIDDEN),)),
    "swi_glu_grad": (
        "SwiGluGrad",
        lambda grad, x: _ops.swi_glu_grad(grad, x),
        lambda n: (_randn(n, HIDDEN // 2), _randn(n, HIDDEN)),
    ),
}


def _new_nodes(before: set[Any]) -> Counter[str]:
    nodes: Counter[str] = Counter()
    for key, of_graph in session.node_counts().items():
        if key not in before:
            for of_fx_node in of_graph.values():
                nodes.update(of_fx_node)
    return nodes


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_one_node_that_computes_what_eager_does(name: str, dynamic: bool) -> None:
    opdef = find(CASES[name][0])
    assert opdef is not None
    with use_product(opdef.products[0]):
        _compare_with_eager(name, dynamic)


def _compare_with_eager(name: str, dynamic: bool) -> None:
    ge_type, function, make = CASES[name]
    before = set(session.node_counts())
    compiled = torch.compile(
        function, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )
    for tokens in (7, 12) if dynamic else (7,):
        inputs = make(tokens)
        got = compiled(*(tensor.npu() for tensor in inputs))
        want = function(*inputs)
        for one, expected in zip(_flat(got), _flat(want), strict=True):
            torch.testing.assert_close(one.cpu(), expected)
    assert _new_nodes(before)[ge_type] == 1


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


ACROSS_RANKS = {
    "MoeDistributeCombine",
    "MoeDistributeCombineV2",
    "MoeDistributeCombineV3",
    "MoeDistributeDispatch",
    "MoeDistributeDispatchV2",
    "MoeDistributeDispatchV3",
}


def test_every_op_is_covered() -> None:
    covered = {ge_type for ge_type, _, _ in CASES.values()}
    assert covered == {opdef.ge_type for opdef in all_opdefs()} - ACROSS_RANKS


def test_an_exchange_between_ranks_becomes_a_node_that_says_it_cannot_run() -> None:
    def dispatch(x: torch.Tensor, ids: torch.Tensor) -> Any:
        return _ops.moe_distribute_dispatch_v2(
            x, ids, None, None, None, None, None, "ep", 16, 0, 64
        )[0]

    compiled = torch.compile(dispatch, backend=torchair.get_npu_backend(), fullgraph=True)
    x = torch.zeros(8, 7168, dtype=torch.bfloat16, device="npu")
    with pytest.raises(RuntimeError, match="MoeDistributeDispatchV2 exchanges rows between ranks"):
        compiled(x, torch.zeros(8, 6, dtype=torch.int32, device="npu"))


def test_every_torch_op_has_a_converter() -> None:
    names = [torch_name(opdef.ge_type) for opdef in all_opdefs()] + ["grouped_matmul_single"]
    for name in names:
        assert hasattr(getattr(_ops, name).default, "_ge_converter"), name


def _layer(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    expanded, row_idx, ends = _init_routing(x, ids)
    ends = ends.to(torch.int64)
    inner = _ops.swi_glu(_ops.grouped_matmul_single(expanded, up, None, ends))
    rows = _ops.grouped_matmul_single(inner, down, None, ends)
    y: torch.Tensor = _finalize(rows, row_idx, x, scales)
    return y


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_trains(dtype: torch.dtype, dynamic: bool) -> None:
    before = set(session.node_counts())
    compiled = torch.compile(
        _layer, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )
    up, down = _randn(EXPERTS, HIDDEN, 8, dtype=dtype), _randn(EXPERTS, 4, HIDDEN, dtype=dtype)
    for tokens in (7, 12) if dynamic else (7,):
        ids = _ids(tokens)
        leaves = [_randn(tokens, HIDDEN, dtype=dtype), torch.rand(tokens, TOP_K), up, down]
        gradients = []
        for run, device in ((compiled, "npu"), (_layer, "cpu")):
            x, scales, w, v = (leaf.to(device, copy=True).requires_grad_() for leaf in leaves)
            run(x, ids.to(device), scales, w, v).sum().backward()
            gradients.append([leaf.grad.cpu() for leaf in (x, scales, w, v)])
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want)
    nodes = _new_nodes(before)
    wanted = {
        "MoeInitRoutingV2": 1,
        "MoeInitRoutingV2Grad": 1,
        "MoeFinalizeRoutingV2": 1,
        "MoeFinalizeRoutingV2Grad": 1,
        "SwiGlu": 1,
        "SwiGluGrad": 1,
        "GroupedMatmul": 6,
    }
    assert {ge_type: nodes[ge_type] for ge_type in wanted} == wanted


def _combine(
    mode: int, rows: torch.Tensor, row_idx: torch.Tensor, *others: torch.Tensor | None
) -> torch.Tensor:
    x1, x2, bias, scales, ids = others
    y: torch.Tensor = _ops.moe_finalize_routing_v2(
        rows, row_idx, x1, x2, bias, scales, ids, drop_pad_mode=mode, k=TOP_K
    )
    return y


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("scaled", [False, True])
def test_the_gradients_of_a_combine_lower(mode: int, scaled: bool, dynamic: bool) -> None:
    tokens, capacity = 7, 9
    drops = mode in (1, 3)
    rows = (EXPERTS, capacity, HIDDEN) if drops else (tokens * TOP_K, HIDDEN)
    row_idx = _row_idx(tokens)
    if drops:
        row_idx[::3] = -1
    leaves = [
        _randn(*rows),
        _randn(tokens, HIDDEN),
        _randn(tokens, HIDDEN),
        _randn(EXPERTS, HIDDEN),
        *([_randn(tokens, TOP_K)] if scaled else []),
    ]
    ids = _ids(tokens)
    compiled = torch.compile(
        _combine, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )
    gradients = []
    for run, device in ((compiled, "npu"), (_combine, "cpu")):
        placed = [leaf.to(device, copy=True).requires_grad_() for leaf in leaves]
        expanded, x1, x2, bias, *rest = placed
        scales = rest[0] if scaled else None
        y = run(mode, expanded, row_idx.to(device), x1, x2, bias, scales, ids.to(device))
        (y * y.detach()).sum().backward()
        gradients.append([leaf.grad.cpu() for leaf in placed])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm_type", [0, 1, 2])
def test_the_gradient_of_a_router_lowers(norm_type: int) -> None:
    def route(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ops.moe_gating_top_k(
            x, None, None, None, TOP_K, renorm=1, norm_type=norm_type
        )[0]
        return y

    compiled = torch.compile(
        route, backend=torchair.get_npu_backend(), dynamic=True, fullgraph=True
    )
    with use_product(Soc.ASCEND950):
        for tokens in (7, 12):
            logits, weights = _randn(tokens, EXPERTS), _randn(tokens, TOP_K)
            logits[:, 1] = -torch.inf
            gradients = []
            for run, device in ((compiled, "npu"), (route, "cpu")):
                x = logits.to(device, copy=True).requires_grad_()
                (run(x) * weights.to(device)).sum().backward()
                gradients.append(x.grad.cpu())
            torch.testing.assert_close(*gradients)
            assert gradients[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_of_a_bias_lowers(dtype: torch.dtype) -> None:
    bias_dtype = torch.float16 if dtype is torch.float16 else torch.float32

    def grouped(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        y: torch.Tensor = _ops.grouped_matmul_single(x, w, b, ends, transpose_weight=True)
        return y

    compiled = torch.compile(
        grouped, backend=torchair.get_npu_backend(), dynamic=True, fullgraph=True
    )
    leaves = [
        _randn(8, HIDDEN, dtype=dtype),
        _randn(EXPERTS, INNER, HIDDEN, dtype=dtype),
        _randn(EXPERTS, INNER, dtype=bias_dtype),
    ]
    gradients = []
    for run, device in ((compiled, "npu"), (grouped, "cpu")):
        placed = [leaf.to(device, copy=True).requires_grad_() for leaf in leaves]
        run(*placed, _ends(8).to(device)).square().sum().backward()
        gradients.append([leaf.grad.cpu() for leaf in placed])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_bad_values_reach_python_with_the_argument() -> None:
    compiled = torch.compile(
        _init_routing, backend=torchair.get_npu_backend(), dynamic=False, fullgraph=True
    )
    ids = torch.full((3, TOP_K), EXPERTS, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=r"expert_idx: got ids from 4 to 4, want ids in \[0, 4\)"
    ):
        compiled(_randn(3, HIDDEN).npu(), ids.npu())
