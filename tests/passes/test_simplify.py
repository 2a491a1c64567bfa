"""No-ops, reads of sizes and what nobody reads leave a copy of the graph; everything else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import functional

from moe_graph.config import Config
from moe_graph.passes import rewrite_moe_layers
from moe_graph.passes.simplify import simplified

ROWS, WIDTH = 5, 4


def captured(
    function: Callable[..., Any], dynamic: bool = False, rows: int = ROWS
) -> tuple[GraphModule, Any]:
    """Return the dynamo graph of `function(x)`, and its inputs."""
    found: list[tuple[GraphModule, Any]] = []

    def record(gm: GraphModule, inputs: Any) -> Any:
        found.append((gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(rows, WIDTH, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=record, dynamic=dynamic, fullgraph=True)(x)
    return found[0]


def calls(graph: Graph) -> list[str]:
    return [
        str(getattr(n.target, "__name__", n.target))
        for n in graph.nodes
        if n.op in ("call_function", "call_method")
    ]


NO_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "+ 0": lambda x: (x.sin() + 0).exp(),
    "- 0": lambda x: (x.sin() - 0).exp(),
    "* 1": lambda x: (x.sin() * 1.0).exp(),
    "/ 1": lambda x: (x.sin() / 1).exp(),
    "dropout(0)": lambda x: functional.dropout(x.sin(), 0.0).exp(),
    "dropout in eval": lambda x: functional.dropout(x.sin(), 0.5, training=False).exp(),
    "clone": lambda x: x.sin().clone().exp(),
    "contiguous": lambda x: x.sin().contiguous().exp(),
    "to(same dtype)": lambda x: x.sin().to(torch.float32).exp(),
    "[:]": lambda x: x.sin()[:].exp(),
    "[...]": lambda x: x.sin()[...].exp(),
    "view(-1).view": lambda x: x.sin().view(-1).view(x.shape).exp(),
    "unsqueeze squeeze": lambda x: x.sin().unsqueeze(0).squeeze(0).exp(),
    "two transpositions": lambda x: x.sin().t().transpose(0, 1).exp(),
    "several": lambda x: ((x.sin()[:] * 1).clone().unsqueeze(1) + 0).squeeze(1).exp(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_goes(name: str, dynamic: bool) -> None:
    gm, inputs = captured(NO_OPS[name], dynamic)
    before = list(map(str, gm.graph.nodes))
    graph = simplified(gm.graph)
    assert graph is not None
    assert calls(graph) == ["sin", "exp"]
    assert list(map(str, gm.graph.nodes)) == before, "only a copy is simplified"
    graph.lint()
    (expected,), (got,) = gm(*inputs), GraphModule(gm, graph)(*inputs)
    assert torch.equal(got, expected)


def test_strides_of_an_index_do_not_matter() -> None:
    def function(x: Tensor) -> Tensor:
        index = torch.nonzero(x.detach() > 0)
        return x[(index.contiguous() + 0)[:, 0]]

    gm, inputs = captured(function)
    graph = simplified(gm.graph)
    assert graph is not None
    assert {"contiguous", "add"} - set(calls(graph))
    (expected,), (got,) = gm(*inputs), GraphModule(gm, graph)(*inputs)
    assert torch.equal(got, expected)


def written_copy(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.clone()
    z.mul_(2)
    return (y + z).exp()


def written_source(x: Tensor) -> Tensor:
    y = x.sin()
    z = y + 0
    y.mul_(2)
    return (y * z).exp()


def written_between(x: Tensor) -> Tensor:
    y = x.sin().unsqueeze(0)
    z = y * 1
    z.add_(3)
    return z.squeeze(0).exp()


def returned_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y.clone().view(-1), y


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 1
    return y.exp() + x


def transposed_square(x: Tensor) -> Tensor:
    return (x[:WIDTH].t().contiguous().exp()).sum()


def other_strides(x: Tensor) -> Tensor:
    return x.t().contiguous().view(-1).exp()


def other_dtype(x: Tensor) -> Tensor:
    return (x.to(torch.float64) * 1.5).exp()


def broadcast(x: Tensor) -> Tensor:
    return (x[:1] * torch.ones(ROWS, 1)).exp()


def floored(x: Tensor) -> Tensor:
    return torch.div(x.sin(), 1, rounding_mode="floor").exp()


def random(x: Tensor) -> Tensor:
    functional.dropout(x, 0.5)
    return functional.dropout(x.sin(), 0.5).exp()


def checked(x: Tensor) -> Tensor:
    torch.ops.aten._assert_async.msg((x < 100).all(), "large")
    return x.exp()


OTHERS = [
    written_copy,
    written_source,
    written_between,
    returned_copy,
    without_gradient,
    transposed_square,
    other_strides,
    other_dtype,
    broadcast,
    checked,
    floored,
    random,
]


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_what_changes_something_stays(function: Callable[..., Any]) -> None:
    gm, inputs = captured(function)
    assert simplified(gm.graph) is None

    def gradient() -> Any:
        torch.manual_seed(0)
        x = inputs[0].detach().clone().requires_grad_()
        outputs = gm(x)
        sum(out.sum() for out in outputs).backward()
        return [*outputs, x.grad]

    before = gradient()
    rewrite_moe_layers(gm, Config())
    assert all(map(torch.equal, gradient(), before))


def sizes(x: Tensor) -> tuple[Tensor, Any]:
    y = x.sin()
    return torch.cat([y, y])[: y.shape[0] * 2].exp(), y.exp().shape[0]


def test_a_size_is_read_where_it_is_known_first() -> None:
    gm, inputs = captured(sizes, dynamic=True)
    graph = gm.graph
    late = next(n for n in graph.nodes if n.target == "sin")
    with graph.inserting_after(late):
        size = graph.call_function(torch.ops.aten.sym_size.int, (late, 0))
    size.meta["example_value"] = late.meta["example_value"].shape[0]
    graph.output_node().args = ((*graph.output_node().args[0], size),)
    gm.recompile()
    simpler = simplified(graph)
    assert simpler is not None
    (reader,) = [n for n in simpler.nodes if n.target == "sin"]
    assert all(user.target is not torch.ops.aten.sym_size.int for user in reader.users)
    expected, got = gm(*inputs), GraphModule(gm, simpler)(*inputs)
    assert torch.equal(got[0], expected[0])
    assert got[1:] == expected[1:]


def unread(x: Tensor) -> Tensor:
    x.sin().exp()
    return x.cos()


def test_what_nobody_reads_goes() -> None:
    gm, _ = captured(unread)
    if "exp" not in calls(gm.graph):
        pytest.skip("dynamo drops it already")
    graph = simplified(gm.graph)
    assert graph is not None
    assert calls(graph) == ["cos"]
