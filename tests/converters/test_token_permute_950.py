"""On Ascend 950 other ops serve the token permutations, in graphs as in eager calls."""

from __future__ import annotations

import pytest
import torch

import moe_graph
from moe_graph import Config, Soc, ops
from moe_graph.emulator.engine import session

TOKENS, TOP_K, HIDDEN = 7, 2, 6
ON_950 = Config(soc="950")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _layer(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    rows, places = ops.moe_token_permute(x, ids)
    return ops.moe_token_unpermute(rows.sin(), places, probs)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_layer_trains_with_the_serving_ops_alone(dynamic: bool) -> None:
    before = set(session.node_counts())
    x, probs = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K)
    ids = torch.randint(0, 4, (TOKENS, TOP_K), dtype=torch.int32)
    inputs = [x.npu().requires_grad_(), ids.npu(), probs.npu().requires_grad_()]
    compiled = torch.compile(
        _layer, backend=moe_graph.npu_backend(ON_950), dynamic=dynamic, fullgraph=True
    )
    y = compiled(*inputs)
    y.square().sum().backward()

    x.requires_grad_()
    probs.requires_grad_()
    want = x.sin() * probs.sum(1, keepdim=True)
    want.square().sum().backward()
    torch.testing.assert_close(y.cpu(), want)
    torch.testing.assert_close(inputs[0].grad.cpu(), x.grad)
    torch.testing.assert_close(inputs[2].grad.cpu(), probs.grad)

    graphs = [nodes for key, nodes in session.node_counts().items() if key not in before]
    types = {ge_type for graph in graphs for nodes in graph.values() for ge_type in nodes}
    assert not {name for name in types if name.startswith("MoeToken")}
    assert {
        "MoeInitRoutingV2",
        "MoeInitRoutingV2Grad",
        "MoeFinalizeRoutingV2",
        "MoeFinalizeRoutingV2Grad",
    } <= types


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("num_out_tokens", [0, 5, -3])
def test_permuted_rows_are_those_of_an_eager_call(dtype: torch.dtype, num_out_tokens: int) -> None:
    if dtype is torch.int8 and num_out_tokens:
        pytest.skip("MoeInitRoutingV3 keeps every row: refused, see tests/ops")
    x = (torch.randn(TOKENS, HIDDEN) * 9).to(dtype)
    ids = torch.randint(0, 4, (TOKENS, TOP_K), dtype=torch.int64)

    def permute(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.moe_token_permute(x, ids, num_out_tokens)

    compiled = torch.compile(permute, backend=moe_graph.npu_backend(ON_950), fullgraph=True)
    with ops.use_product(Soc.ASCEND950):  # the emulated device is an A2 otherwise
        got = compiled(x.npu(), ids.npu())
    order = torch.sort(ids.reshape(-1), stable=True).indices
    rows = num_out_tokens if num_out_tokens > 0 else TOKENS * TOP_K + num_out_tokens
    assert torch.equal(got[0].cpu(), x[order[:rows] // TOP_K])
    assert torch.equal(got[1].cpu().long(), torch.sort(order).indices)


def test_the_graph_engine_of_950_has_no_such_type() -> None:
    opdef = ops.find("MoeTokenPermute")
    assert opdef is not None
    with pytest.raises(moe_graph.OpError, match="graph engine"):
        opdef.require_in_graph_engine(Soc.ASCEND950)
