"""What PyTorch asks of a custom op: schema, aliasing, fake kernel, autograd, dynamic shapes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_graph import ops
from moe_graph.ops import OpError
from moe_graph.ops.opdef import REQUIRED
from moe_graph.ops.torch_binding import torch_name
from tests.ops.comparing import routing

TOKENS, TOP_K, EXPERTS, HIDDEN = 5, 2, 4, 6
COPIES = TOKENS * TOP_K
_ops = torch.ops.moe_graph


def _row_idx() -> torch.Tensor:
    return torch.randperm(COPIES).to(torch.int32)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def _ends() -> torch.Tensor:
    return torch.tensor([3, 3, 7, COPIES])


SAMPLES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "init_routing": lambda: (
        _ops.moe_init_routing_v2,
        (_leaf(TOKENS, HIDDEN), routing(TOKENS, TOP_K, EXPERTS, 0), 0, 0, EXPERTS, 0, 1),
    ),
    "init_routing_drop_pad": lambda: (
        _ops.moe_init_routing_v2,
        (_leaf(TOKENS, HIDDEN), routing(TOKENS, TOP_K, EXPERTS, 0), 0, 2, EXPERTS, 1, 0, True),
    ),
    "init_routing_grad": lambda: (
        _ops.moe_init_routing_v2_grad,
        (torch.randn(COPIES, HIDDEN), _row_idx(), TOP_K),
    ),
    "finalize_routing": lambda: (
        _ops.moe_finalize_routing_v2,
        (
            _leaf(COPIES, HIDDEN),
            _row_idx(),
            _leaf(TOKENS, HIDDEN),
            _leaf(TOKENS, HIDDEN),
            _leaf(EXPERTS, HIDDEN),
            _leaf(TOKENS, TOP_K),
            routing(TOKENS, TOP_K, EXPERTS, 0),
            *[None] * 4,
            2,
        ),
    ),
    "finalize_routing_mixed": lambda: (
        _ops.moe_finalize_routing_v2,
        (
            _leaf(COPIES, HIDDEN, dtype=torch.bfloat16),
            _row_idx(),
            None,
            None,
            None,
            _leaf(TOKENS, TOP_K),
            *[None] * 5,
            2,
        ),
    ),
    "finalize_routing_grad": lambda: (
        _ops.moe_finalize_routing_v2_grad,
        (
            torch.randn(TOKENS, HIDDEN),
            _row_idx(),
            torch.randn(COPIES, HIDDEN),
            torch.randn(TOKENS, TOP_K),
        ),
    ),
    "grouped_matmul": lambda: (
        _ops.grouped_matmul,
        (
            [torch.randn(COPIES, HIDDEN)],
            [torch.randn(EXPERTS, HIDDEN, 3)],
            [],
            [],
            [],
            [],
            [],
            _ends(),
            None,
            3,
            0,
            False,
            False,
            0,
        ),
    ),
    "grouped_matmul_single": lambda: (
        _ops.grouped_matmul_single,
        (_leaf(COPIES, HIDDEN), _leaf(EXPERTS, HIDDEN, 3), _leaf(EXPERTS, 3), _ends()),
    ),
    "swi_glu": lambda: (_ops.swi_glu, (_leaf(TOKENS, HIDDEN),)),
    "swi_glu_grad": lambda: (
        _ops.swi_glu_grad,
        (torch.randn(TOKENS, HIDDEN // 2), torch.randn(TOKENS, HIDDEN)),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    op, args = SAMPLES[name]()
    torch.library.opcheck(op.default, args)


def test_every_opdef_has_a_torch_op_with_its_arguments() -> None:
    for opdef in ops.all_opdefs():
        schema = getattr(_ops, torch_name(opdef.ge_type)).default._schema
        names = [argument.name for argument in schema.arguments]
        assert names == [declared.name for declared in (*opdef.inputs, *opdef.attrs)]
        for argument in schema.arguments[len(opdef.inputs) :]:
            (attr,) = (attr for attr in opdef.attrs if attr.name == argument.name)
            if attr.default is REQUIRED:
                assert not argument.has_default_value()
            else:
                default = argument.default_value
                assert (tuple(default) if isinstance(default, list) else default) == attr.default


@pytest.mark.parametrize(
    ("ge_type", "name"),
    [
        ("MoeInitRoutingV2", "moe_init_routing_v2"),
        ("MoeFinalizeRoutingV2Grad", "moe_finalize_routing_v2_grad"),
        ("GroupedMatmul", "grouped_matmul"),
        ("SwiGlu", "swi_glu"),
    ],
)
def test_names(ge_type: str, name: str) -> None:
    assert torch_name(ge_type) == name


def test_errors_keep_their_fields_across_processes() -> None:
    error = OpError("Op", "x", got="1", want="2", hint="try 2", product="A2")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "Op: x: got 1, want 2 on A2; try 2"
    assert vars(copy) == vars(error)
    assert isinstance(error, ValueError)


def _layer(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, w: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    expanded, row_idx, ends, _ = _ops.moe_init_routing_v2(
        x, ids, expert_num=EXPERTS, expert_tokens_count_or_cumsum_flag=1
    )
    ends = ends.to(torch.int64)
    inner = _ops.swi_glu(_ops.grouped_matmul_single(expanded, w, None, ends))
    rows = _ops.grouped_matmul_single(inner, d, None, ends)
    y: torch.Tensor = _ops.moe_finalize_routing_v2(
        rows, row_idx, None, None, None, scales, None, drop_pad_mode=2
    )
    return y


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("top_k", [1, EXPERTS])
def test_a_layer_of_few_tokens_trains(tokens: int, top_k: int) -> None:
    x, scales, weight, down = (
        _leaf(tokens, HIDDEN),
        _leaf(tokens, top_k),
        _leaf(EXPERTS, HIDDEN, 8),
        _leaf(EXPERTS, 4, HIDDEN),
    )
    ids = torch.arange(top_k, dtype=torch.int32).expand(tokens, top_k).contiguous()
    y = _layer(x, ids, scales, weight, down)
    assert y.shape == (tokens, HIDDEN)
    y.sum().backward()
    for leaf in (x, scales, weight, down):
        assert torch.isfinite(leaf.grad).all()
    assert torch.equal(weight.grad[top_k:], torch.zeros(EXPERTS - top_k, HIDDEN, 8))
    if tokens:
        gate, up = torch.einsum("h,ehi->ei", x[0], weight)[:top_k].chunk(2, -1)
        rows = torch.einsum("ei,eih->eh", torch.nn.functional.silu(gate) * up, down[:top_k])
        torch.testing.assert_close(y[0], scales[0] @ rows)


@pytest.mark.parametrize("name", ["init_routing_grad", "swi_glu_grad", "finalize_routing_grad"])
def test_a_missing_gradient_is_an_error(name: str) -> None:
    op, (first, *rest) = SAMPLES[name]()
    output = op(first.requires_grad_(), *rest)
    output = output[0] if isinstance(output, tuple) else output
    with pytest.raises(NotImplementedError, match=f"{op._qualified_op_name} has no gradient"):
        output.sum().backward()


def test_inputs_of_any_stride() -> None:
    x, ids = torch.randn(HIDDEN, TOKENS).t(), routing(TOP_K, TOKENS, EXPERTS, 0).t()
    scales = torch.rand(TOP_K, TOKENS).t()
    weight, down = torch.randn(EXPERTS, 8, HIDDEN).mT, torch.randn(EXPERTS, HIDDEN, 4).mT
    strided = (x, ids, scales, weight, down)
    dense = tuple(tensor.contiguous() for tensor in strided)
    torch.testing.assert_close(_layer(*strided), _layer(*dense))
    grad = torch.ones(1, 1).expand(COPIES, HIDDEN)
    row_idx = torch.stack([_row_idx(), _row_idx()], 1)[:, 0]
    torch.testing.assert_close(
        ops.moe_init_routing_grad(grad, row_idx, TOP_K), torch.full((TOKENS, HIDDEN), float(TOP_K))
    )


def test_compiled_training_step_equals_eager() -> None:
    weight, down = torch.randn(EXPERTS, HIDDEN, 8), torch.randn(EXPERTS, 4, HIDDEN)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_layer, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (5, 3, 17, 64):
        grads = []
        torch.manual_seed(tokens)
        x, scales = torch.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K)
        ids = routing(tokens, TOP_K, EXPERTS, tokens)
        for run in (_layer, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, scales, weight, down)]
            run(leaves[0], ids, leaves[1], leaves[2], leaves[3]).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1
