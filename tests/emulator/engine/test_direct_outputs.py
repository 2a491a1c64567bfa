"""Results that kernels write to the caller's memory straight away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ge_graphs import SESSION, add, ge, serialise
from torchair._ge_concrete_graph.compat_ir import ge_op
from torchair.ge import attr

from moe_graph.emulator.engine import session

X = torch.randn(6, 8)


def swi_glu(x: Any) -> Any:
    return ge_op("SwiGlu", inputs={"x": x}, outputs=["y"], attrs={"dim": attr.Int(-1)})


def expected(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def run_twice(
    build: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Run a graph once with every check and once without, as all later runs are."""
    graph = add(serialise(build, inputs))
    session.run(SESSION, graph, [each.clone() for each in inputs])
    return session.run(SESSION, graph, inputs, outputs)


def test_a_result_lies_where_the_caller_wants_it() -> None:
    target = torch.full((6, 4), torch.nan)
    (y,) = run_twice(swi_glu, [X], [target])
    assert y is target
    torch.testing.assert_close(target, expected(X))


@pytest.mark.parametrize("shape", [(4, 6), (24,)])
def test_memory_of_another_shape_is_not_written_by_the_kernel(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="size"):
        run_twice(swi_glu, [X], [torch.empty(shape)])


def test_strided_memory_gets_a_copy() -> None:
    target = torch.empty(4, 6).t()
    run_twice(swi_glu, [X], [target])
    torch.testing.assert_close(target, expected(X))


def test_a_value_that_is_an_output_twice() -> None:
    targets: list[torch.Tensor | None] = [torch.empty(6, 4), None, torch.empty(6, 4)]

    def build(x: Any) -> list[Any]:
        y = swi_glu(x)
        return [y, y, y]

    results = run_twice(build, [X], targets)
    assert len({each.data_ptr() for each in results}) == 3
    for each in results:
        torch.testing.assert_close(each, expected(X))


def test_an_output_over_an_input_waits_until_all_have_read_it() -> None:
    x = torch.randn(6, 8)
    want_sum = expected(x) + x[:, :4]
    memory = x.view(-1)[:24].view(6, 4)  # begins where x begins

    def build(data: Any) -> list[Any]:
        left = ge.Slice(data, [0, 0], [6, 4])
        return [swi_glu(data), ge.Add(swi_glu(data), left)]

    want = expected(x)
    results = run_twice(build, [x], [memory, torch.empty(6, 4)])
    torch.testing.assert_close(results[0], want)
    torch.testing.assert_close(results[1], want_sum)
