"""Routers become one op where an op computes the same, and stay with a reason elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from moe_graph.config import Config
from moe_graph.ops import use_product
from moe_graph.passes import rewrite_moe_layers, router_plan
from moe_graph.report import LayerReport
from tests.passes.capturing import Capture, compile_rewritten, result_and_gradients
from tests.passes.families import FAMILIES, Family
from tests.passes.families import HIDDEN as FAMILY_HIDDEN
from tests.passes.routers import EXPERTS, HIDDEN, LOWERED, STAY, TOP_K, RoutedMoe, Router

TOKENS = 9
SELECTING = {"topk", "softmax", "sigmoid", "max", "argmax", "scatter", "scatter_", "masked_fill"}

OF_FAMILY = {
    "mixtral": "MoeGatingTopK",
    "minimax": "MoeGatingTopK",
    "qwen2_moe": "MoeGatingTopKSoftmax",
    "qwen3_moe": "MoeGatingTopKSoftmax",
    "qwen3_next": "MoeGatingTopK",
    "deepseek_v2": "MoeGatingTopKSoftmax",
    "deepseek_v3": "MoeGatingTopK",
    "olmoe": "MoeGatingTopKSoftmax",
    "flex_olmo": "MoeGatingTopKSoftmax",
    "phimoe": "router-choice",  # sparsemixer: two choices, the second among other scores
    "granitemoe": "MoeGatingTopKSoftmaxV2",
    "jamba": "MoeGatingTopKSoftmax",
    "gpt_oss": "MoeGatingTopKSoftmaxV2",
    "glm4_moe": "MoeGatingTopK",
    "ernie4_5_moe": "MoeGatingTopK",
    "hunyuan_v1_moe": "MoeGatingTopK",
    "dots1": "MoeGatingTopK",  # for the ids: its weights are not divided
    "lfm2_moe": "MoeGatingTopK",
    "bailing_hybrid": "MoeGatingTopK",
    "nemotron_h": "MoeGatingTopK",
    "afmoe": "MoeGatingTopK",
    "minimax_m2": "MoeGatingTopK",
    "solar_open": "MoeGatingTopK",
    "hy_v3": "MoeGatingTopK",
    "exaone_moe": "MoeGatingTopK",
    "mimo_v2_flash": "MoeGatingTopK",
    "openai_privacy_filter": "MoeGatingTopKSoftmaxV2",
    "muse_spark": "MoeGatingTopK",
    "beam": "MoeGatingTopK",
}
"""Model -> the op of its router, or the check that keeps it."""


def inputs(kind: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return tokens, and logits with no two equal in a row, in whatever dtype."""
    steps = torch.linspace(-2.0, 2.0, EXPERTS)
    logits = torch.stack([steps[torch.randperm(EXPERTS)] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN), logits.to(kind)


def gradients(function: Callable[..., Any], module: nn.Module, *args: Tensor) -> list[Tensor]:
    """Return the result and the gradients of the floating inputs and of all parameters."""
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    module.zero_grad(set_to_none=True)
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(1)
    floating = [r for r in results if r.is_floating_point()]
    torch.autograd.backward(floating, [torch.randn_like(r) for r in floating])
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    return [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None), *parameters]


def lowered(
    module: nn.Module, *args: Tensor, config: Config | None = None
) -> tuple[LayerReport, Capture]:
    """Compile, compare values and gradients with eager code, return what became of the layer."""
    config = config or Config()
    expected = gradients(module, module, *args)
    compiled, capture = compile_rewritten(module, config=config)
    with use_product(config.product):
        results = gradients(compiled, module, *args)
    torch.testing.assert_close(results[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    (layer,) = capture.layers
    assert layer.status == "rewritten", layer.reasons
    return layer, capture


def calls_of(capture: Capture, op: str) -> int:
    name = str(router_plan.TORCH_OPS[op]).removeprefix("moe_graph.").removesuffix(".default")
    return capture.ops[name]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model)
def test_family(family: Family) -> None:
    block = family.build().eval()
    x = torch.randn(2, 9, FAMILY_HIDDEN)
    expected, expected_gradients = result_and_gradients(block, block, x)
    compiled, capture = compile_rewritten(block, config=Config(verify=True))
    result, found = result_and_gradients(compiled, block, x)

    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    (layer,) = capture.layers
    if OF_FAMILY[family.model].startswith("Moe"):
        assert (layer.router_op, layer.router_reasons) == (OF_FAMILY[family.model], [])
        assert calls_of(capture, layer.router_op) == 1
        assert capture.ops["topk"] == 0
    else:
        (reason,) = layer.router_reasons
        assert (layer.router_op, reason.check) == ("", OF_FAMILY[family.model])
        assert not any(calls_of(capture, op) for op in router_plan.TORCH_OPS)


def test_group_limited_deepseek_v2() -> None:
    settings = {"topk_method": "group_limited_greedy"}
    family = next(f for f in FAMILIES if f.model == "deepseek_v2")
    block = Family(family.model, family.block, family.config, settings=settings).build().eval()
    x = torch.randn(2, 9, FAMILY_HIDDEN)
    expected, _ = result_and_gradients(block, block, x)
    compiled, capture = compile_rewritten(block)
    result, _ = result_and_gradients(compiled, block, x)

    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert capture.layers[0].router_op == "MoeGatingTopK"
    assert not SELECTING & capture.ops.keys()


@pytest.mark.parametrize("name", LOWERED)
def test_one_op_in_place_of_the_router(name: str) -> None:
    op, router = LOWERED[name]
    layer, capture = lowered(RoutedMoe(router), *inputs(), config=Config(verify=True))

    assert (layer.router_op, layer.router_reasons) == (op, [])
    assert calls_of(capture, op) == 1
    # The weights of these are not the op's: they are gathered, or divided by something else.
    own = {"sigmoid-undivided": {"sigmoid"}, "other-divisor": {"softmax"}}
    assert SELECTING & capture.ops.keys() == own.get(name, set())
    assert layer.fx_nodes_after < layer.fx_nodes_before


@pytest.mark.parametrize("name", STAY)
def test_what_no_op_computes_stays_as_it_is(name: str) -> None:
    check, router = STAY[name]
    layer, capture = lowered(RoutedMoe(router), *inputs())

    assert layer.router_op == ""
    assert [reason.check for reason in layer.router_reasons] == [check]
    assert all(reason.want and reason.got and reason.source for reason in layer.router_reasons)
    assert not any(calls_of(capture, op) for op in router_plan.TORCH_OPS)


@pytest.mark.parametrize("name", LOWERED)
def test_equal_scores_and_one_expert_for_all(name: str) -> None:
    _, router = LOWERED[name]
    module = RoutedMoe(router)
    with torch.no_grad():
        module.bias.zero_()
    x, logits = inputs()
    logits[:3] = 0.0
    logits[3:6, 5] = 30.0
    compiled, _ = compile_rewritten(lambda z: router(module, z))
    weights, ids = router(module, logits)

    layer_ids = _ids_of(module, x, logits)
    assert layer_ids[:3].tolist() == [list(range(ids.shape[1]))] * 3
    rest = slice(3, None)
    torch.testing.assert_close(layer_ids[rest].sort(-1)[0], ids[rest].sort(-1)[0])
    torch.testing.assert_close(compiled(logits)[0], weights)


def _ids_of(module: RoutedMoe, x: Tensor, logits: Tensor) -> Tensor:
    """Return the ids that the compiled layer chooses."""

    def layer(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen: list[Tensor] = []

        def router(m: RoutedMoe, z: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = original(m, z)
            chosen.append(ids)
            return weights, ids

        original, module.router = module.router, router
        try:
            return module(x, logits), chosen[0]
        finally:
            module.router = original

    compiled, capture = compile_rewritten(layer)
    ids = compiled(x, logits)[1]
    assert capture.layers[0].router_op
    return ids


@pytest.mark.parametrize("name", ["softmax-topk", "in-place", "topk-softmax", "deepseek-v3"])
def test_one_dynamic_graph_serves_every_token_count(name: str) -> None:
    module = RoutedMoe(LOWERED[name][1])

    def layer(both: Tensor) -> Tensor:
        return module(*both.split([HIDDEN, EXPERTS], -1))

    compiled, capture = compile_rewritten(layer, dynamic=True)
    for tokens in (4, 3, 17, 64, 2, 31):
        both = torch.cat(inputs(tokens=tokens), -1)
        torch.testing.assert_close(compiled(both), layer(both), rtol=1e-5, atol=1e-5)
    assert [layer.router_op for layer in capture.layers] == [LOWERED[name][0]]


@pytest.mark.parametrize("name", LOWERED)
def test_aten_graph(name: str) -> None:
    module = RoutedMoe(LOWERED[name][1])
    parameters = dict(module.named_parameters())

    def layer(x: Tensor, logits: Tensor, p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, p, (x, logits))

    args = inputs()
    gm = make_fx(layer, tracing_mode="fake")(*args, parameters)
    (report,) = rewrite_moe_layers(gm, Config())
    torch.testing.assert_close(gm(*args, parameters), module(*args), rtol=1e-5, atol=1e-5)
    assert report.router_op == LOWERED[name][0]


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", ["softmax-topk", "in-place", "topk-softmax", "deepseek-v3"])
def test_no_token_and_one_token(name: str, tokens: int) -> None:
    module = RoutedMoe(LOWERED[name][1])
    x, logits = torch.randn(tokens, HIDDEN), torch.randn(tokens, EXPERTS)
    assert lowered(module, x, logits)[0].router_op == LOWERED[name][0]


@pytest.mark.parametrize("name", ["softmax-topk", "in-place", "topk-softmax", "deepseek-v3"])
def test_leading_dimensions(name: str) -> None:
    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = LOWERED[name][1](m, logits.view(-1, EXPERTS))
        return weights, ids

    layer, _ = lowered(RoutedMoe(router), torch.randn(8, HIDDEN), torch.randn(2, 4, EXPERTS))
    assert layer.router_op == LOWERED[name][0]


def test_logits_by_batch_and_token() -> None:
    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights.flatten(0, 1), ids.flatten(0, 1)

    layer, _ = lowered(RoutedMoe(router), torch.randn(8, HIDDEN), torch.randn(2, 4, EXPERTS))
    assert layer.router_op == "MoeGatingTopK"


@pytest.mark.parametrize("name", ["softmax-topk", "renormalised"])
def test_logits_with_two_unknown_sizes(name: str) -> None:
    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(TOP_K)
        if name == "renormalised":
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.flatten(0, 1), ids.flatten(0, 1)

    module = RoutedMoe(router)

    def layer(both: Tensor) -> Tensor:
        x, logits = both.split([HIDDEN, EXPERTS], -1)
        return module(x.flatten(0, 1), logits)

    compiled, capture = compile_rewritten(layer, dynamic=True)
    for batch, length in ((2, 3), (4, 5)):
        both = torch.cat([t.unflatten(0, (batch, -1)) for t in inputs(tokens=batch * length)], -1)
        torch.testing.assert_close(compiled(both), layer(both), rtol=1e-5, atol=1e-5)
    (report,) = capture.layers
    checks = [reason.check for reason in report.router_reasons]
    # The op takes [B, S, E], but not with the division, which the source keeps then.
    assert (report.router_op, checks) == ("MoeGatingTopKSoftmax", [])
    assert capture.ops["truediv"] == (name == "renormalised")


class WithAuxiliaryLoss(RoutedMoe):
    """Also returns a loss of the scores, as load balancing has it, and the ids."""

    def __init__(self, renormalise: bool) -> None:
        super().__init__(self.route)
        self.renormalise = renormalise

    def route(self, _: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        self.scores = logits.softmax(-1)
        weights, self.ids = self.scores.topk(TOP_K)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, self.ids

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(x, logits)
        share = nn.functional.one_hot(self.ids, EXPERTS).float().mean((0, 1))
        return y, (share * self.scores.mean(0)).sum(), self.ids


@pytest.mark.parametrize("renormalise", [False, True])
def test_scores_that_a_loss_reads_stay_beside_the_op(renormalise: bool) -> None:
    layer, capture = lowered(WithAuxiliaryLoss(renormalise), *inputs())
    assert layer.router_op == ("MoeGatingTopK" if renormalise else "MoeGatingTopKSoftmax")
    assert capture.ops["softmax"] == 1
    assert capture.ops["topk"] == 0


def test_weights_that_are_read_before_the_division_end_the_op_there() -> None:
    class Returning(RoutedMoe):
        def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            self.router = self.route
            return super().forward(x, logits), self.before

        def route(self, _: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
            self.before, ids = logits.softmax(-1).topk(TOP_K)
            return self.before / self.before.sum(-1, keepdim=True), ids

    layer, capture = lowered(Returning(LOWERED["softmax-topk"][1]), *inputs())
    assert layer.router_op == "MoeGatingTopKSoftmax"
    assert capture.ops["truediv"] == 1


def _written_afterwards(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    weights.mul_(logits[:, :1].detach())
    return weights, ids


def _bias_written_afterwards(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = (scores + m.bias).topk(TOP_K)[1]
    with torch.no_grad():
        m.bias.add_(0.1)
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True), ids


def _logits_written_afterwards(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits * 2.0
    weights, ids = logits.softmax(-1).topk(TOP_K)
    logits.add_(logits.detach().amax())
    return weights * logits.detach().mean(), ids


@pytest.mark.parametrize(
    ("router", "outcome"),
    [
        (_written_afterwards, "MoeGatingTopKSoftmax"),
        (_bias_written_afterwards, "MoeGatingTopK"),
        (_logits_written_afterwards, "router-in-place"),
    ],
)
def test_what_is_written_in_place_afterwards(router: Router, outcome: str) -> None:
    module = RoutedMoe(router)
    eager = copy.deepcopy(module)
    args = inputs()
    expected = gradients(eager, eager, *args)
    compiled, capture = compile_rewritten(module)
    results = gradients(compiled, module, *args)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.bias, eager.bias)
    (layer,) = capture.layers
    assert layer.status == "rewritten"
    checks = [reason.check for reason in layer.router_reasons]
    assert (layer.router_op, checks) in [(outcome, []), ("", [outcome])]


def test_ids_that_are_written_after_the_layer_stay_those_of_the_source() -> None:
    module = RoutedMoe(LOWERED["softmax-topk"][1])

    def layer(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = LOWERED["softmax-topk"][1](module, logits)
        module.router = lambda m, z: (weights, ids)
        return module(x, logits), ids.add_(1)

    args = inputs()
    compiled, capture = compile_rewritten(layer)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), layer(*args), rtol=1e-5, atol=1e-5)
    assert [reason.check for reason in capture.layers[0].router_reasons] == ["router-ids"]


@pytest.mark.parametrize("name", ["renormalised", "sigmoid-bias", "deepseek-v3"])
def test_readers_of_sizes_keep_no_router(name: str) -> None:
    module = RoutedMoe(LOWERED[name][1])
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        """Let something read the size of every tensor of the router."""
        sizes = []
        for node in list(gm.graph.nodes):
            if node.name.startswith("sort"):
                break
            value = node.meta.get("example_value")
            if node.op.startswith("call") and isinstance(value, Tensor):
                with gm.graph.inserting_after(node):
                    size = gm.graph.call_method("size", (node, 0))
                size.meta["example_value"] = value.shape[0]
                sizes.append(size)
        output = gm.graph.output_node()
        output.args = ((*output.args[0], *sizes),)
        found.extend(rewrite_moe_layers(gm, Config()))
        return gm.forward

    args = inputs()
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-5, atol=1e-5)
    assert found[0].router_op.startswith("MoeGatingTopK")


def test_detached_scores_get_no_gradient_by_way_of_the_op() -> None:
    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).detach().topk(TOP_K)
        return weights * 1.0, ids

    module = RoutedMoe(router)
    x, logits = inputs()
    logits.requires_grad_()
    compiled, _ = compile_rewritten(module)
    result = compiled(x, logits)
    result.sum().backward()
    torch.testing.assert_close(result, module(x, logits))
    assert logits.grad is None or not logits.grad.any()


def test_a_router_beyond_the_limits_of_the_op_stays() -> None:
    experts, groups = 130, 65  # each group takes up 32 places of 2048 on the device

    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        ranking = logits.sigmoid() + m.bias
        best = ranking.view(-1, groups, 2).amax(-1).topk(60, -1)[1]
        mask = torch.ones(len(logits), groups).scatter_(1, best, 0).unsqueeze(-1)
        masked = ranking.masked_fill(mask.expand(-1, -1, 2).reshape(-1, experts).bool(), -torch.inf)
        ids = masked.topk(TOP_K)[1]
        weights = logits.sigmoid().gather(1, ids)
        return weights, ids

    args = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, experts)
    layer, capture = lowered(RoutedMoe(router, experts), *args)
    (reason,) = layer.router_reasons
    assert (layer.router_op, reason.check) == ("", "router-limits")
    assert reason.got == "MoeGatingTopK group_count = 65 groups of 2"
    assert capture.ops["topk"] == 2


@pytest.mark.parametrize(("product", "op"), [("950", "MoeGatingTopK"), ("A2", "")])
def test_square_root_of_softplus_is_of_one_product(product: str, op: str) -> None:
    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = nn.functional.softplus(logits).sqrt()
        ids = (scores + m.bias).topk(TOP_K)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, ids

    layer, _ = lowered(RoutedMoe(router), *inputs(), config=Config(soc=product))
    assert layer.router_op == op
    assert [reason.check for reason in layer.router_reasons] == ([] if op else ["router-limits"])


def _rounds_to(kind: torch.dtype | None) -> Router:
    """Return a router by softmax in fp32 whose weights are cast to `kind` in the end."""

    def router(m: RoutedMoe, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.float().softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights if kind is None else weights.to(kind), ids

    return router


SIXTEEN_BITS: dict[str, tuple[int, Router]] = {
    # name -> casts beside the op, router
    "weights in fp32": (1, _rounds_to(None)),
    "weights rounded": (0, _rounds_to(torch.bfloat16)),
    "topk, softmax": (0, LOWERED["topk-softmax"][1]),
    "bias in fp32": (1, LOWERED["sigmoid-bias"][1]),
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bits_are_rounded_once_and_equal_eager_bit_for_bit(name: str) -> None:
    casts, router = SIXTEEN_BITS[name]
    module = RoutedMoe(lambda m, z: router(m, z.mul(1.0)))
    x, logits = inputs(torch.bfloat16)

    def layer(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        weights, ids = router(module, logits)
        module.router = lambda m, z: (weights, ids)
        return module(x, logits), weights, ids

    expected = layer(x, logits)
    compiled, capture = compile_rewritten(layer, config=Config(fuse_routers="all", verify=True))
    result = compiled(x, logits)

    assert capture.layers[0].router_op
    places, old_places = result[2].argsort(-1), expected[2].argsort(-1)
    torch.testing.assert_close(result[2].gather(1, places), expected[2].gather(1, old_places))
    weights, old_weights = result[1].gather(1, places), expected[1].gather(1, old_places)
    torch.testing.assert_close(weights, old_weights, rtol=0, atol=2e-7 if casts else 0)
    (op,) = [n for n in capture.modules[0].graph.nodes if n.name.startswith("moe_gating_top_k")]
    assert op.args[0].meta["example_value"].dtype is (torch.float32 if casts else torch.bfloat16)


def test_sixteen_bits_tie_and_stay_unless_asked_for() -> None:
    module = RoutedMoe(_rounds_to(None))
    args = inputs(torch.bfloat16)
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(*args), module(*args))
    (layer,) = capture.layers
    assert [reason.check for reason in layer.router_reasons] == ["router-ties"]
    assert 'fuse_routers="all"' in layer.router_reasons[0].hint


def test_no_router_is_lowered_when_none_is_asked_for() -> None:
    module = RoutedMoe(LOWERED["deepseek-v3"][1])
    layer, capture = lowered(module, *inputs(), config=Config(fuse_routers="none"))
    assert (layer.router_op, layer.router_reasons) == ("", [])
    assert capture.ops["topk"] == 3


def test_layers_that_share_a_router_share_the_op() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = RoutedMoe(lambda m, z: self.routing)
            self.second = RoutedMoe(lambda m, z: self.routing)

        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            self.routing = LOWERED["in-place"][1](self.first, logits)
            return self.second(self.first(x, logits), logits)

    module = Two()
    args = inputs()
    compiled, capture = compile_rewritten(module)
    torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-5, atol=1e-5)
    assert [layer.router_op for layer in capture.layers] == ["MoeGatingTopK"] * 2
    assert calls_of(capture, "MoeGatingTopK") == 1


@pytest.mark.parametrize(
    ("name", "attribute", "wrong", "instead"),
    [
        ("by-methods", "routed_scaling_factor", 2.0, "MoeGatingTopKSoftmax"),
        ("in-place", "renorm", 0, "MoeGatingTopKSoftmax"),
        ("deepseek-v3", "k_group", 3, ""),
        ("deepseek-v3", "group_select_mode", 0, ""),
        ("topk-softmax", "renorm", 0, ""),
    ],
)
def test_verify_takes_an_op_back_that_computes_something_else(
    name: str, attribute: str, wrong: Any, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = router_plan._op_of

    def changed(*args: Any) -> Any:
        found = original(*args)
        if isinstance(found, tuple) and attribute in found[1]:
            found[1][attribute] = wrong
        return found

    monkeypatch.setattr(router_plan, "_op_of", changed)
    module, args = RoutedMoe(LOWERED[name][1]), inputs()
    compiled, capture = compile_rewritten(module, config=Config(verify=True))
    torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-5, atol=1e-5)
    (layer,) = capture.layers
    assert layer.status == "rewritten"
    assert layer.router_op == instead
    assert [reason.check for reason in layer.router_reasons] == ([] if instead else ["verify"])
    assert {op for op in router_plan.TORCH_OPS if calls_of(capture, op)} == {instead} - {""}
