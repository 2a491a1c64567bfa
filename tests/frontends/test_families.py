"""Blocks of transformers make one graph after ``prepare``, with the values they had.

Those of transformers 4.57 run where that is installed, for example in a folder of its own that
``PYTHONPATH`` names.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from moe_graph import preparation, prepare
from tests.frontends.families import VERSION_4, VERSION_5, Family, tokens
from tests.frontends.graphs import Graphs

INSTALLED = version("transformers")


def _parameters(wanted: str, families: list[Family]) -> list[pytest.ParameterSet]:
    other = not INSTALLED.startswith(wanted)
    skip = pytest.mark.skipif(other, reason=f"transformers {INSTALLED} is not {wanted}")
    return [pytest.param(family, id=family.package + wanted, marks=skip) for family in families]


@pytest.mark.parametrize("family", _parameters("4.57", VERSION_4) + _parameters("5.", VERSION_5))
@pytest.mark.parametrize("train", [False, True])
def test_a_prepared_block_is_one_graph_of_equal_values(family: Family, train: bool) -> None:
    block, x, graphs = family.build().train(train), tokens(), Graphs()

    def run(function: object) -> torch.Tensor:
        torch.manual_seed(1)
        return family.call(function, x)

    want = run(block)
    prepare(block)
    statuses = {report.status for report in preparation(block).layers}
    assert statuses == ({"rewritten"} if family.lifted else set())
    torch.testing.assert_close(run(block), want, rtol=0, atol=0)
    torch.testing.assert_close(run(graphs.compile(block)), want, rtol=0, atol=0)
    assert len(graphs) == 1
