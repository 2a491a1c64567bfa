"""What the definitions of the ops say about themselves is complete, and the README repeats it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import moe_graph
from moe_graph import op_docs
from moe_graph.cli import main
from moe_graph.ops import OpDef, all_opdefs, find
from moe_graph.ops.symbolic import outputs_of

README = Path(__file__).parents[1] / "README.md"
OPDEFS = [pytest.param(opdef, id=opdef.ge_type) for opdef in all_opdefs()]


@pytest.mark.parametrize("opdef", OPDEFS)
def test_every_op_states_its_source_and_its_uses(opdef: OpDef) -> None:
    assert opdef.doc
    assert opdef.forms
    assert all(limit.source for limit in opdef.limits)


@pytest.mark.parametrize("opdef", OPDEFS)
def test_the_rule_of_every_use_prints_in_symbols(opdef: OpDef) -> None:
    for form in opdef.forms:
        for soc in opdef.products:
            assert outputs_of(opdef, form, soc), form.name


@pytest.mark.parametrize("opdef", OPDEFS)
def test_an_op_without_gradient_says_why(opdef: OpDef) -> None:
    assert opdef.autograd is not None or opdef.no_gradient


@pytest.mark.parametrize("opdef", OPDEFS)
def test_the_public_function_of_an_op_exists(opdef: OpDef) -> None:
    if opdef.function:
        assert callable(getattr(moe_graph.ops, opdef.function))


def test_every_public_function_belongs_to_an_op() -> None:
    from moe_graph.ops import functional

    assert set(functional.__all__) == {opdef.function for opdef in all_opdefs()} - {""}


def test_the_readme_has_the_table_of_ops() -> None:
    assert op_docs.markdown() in README.read_text()


def test_a_rule_is_printed_in_symbols() -> None:
    opdef = find("MoeInitRoutingV2")
    assert opdef is not None
    console = Console(file=io.StringIO(), width=140)
    op_docs.describe(opdef, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "[K*T]" in text
    assert "[E, C, H]" in text


@pytest.mark.parametrize("name", ["MoeInitRoutingV2", "moe_init_routing_v2", "moe_init_routing"])
def test_an_op_is_found_by_any_of_its_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", name]) == 0
    assert "MoeInitRoutingV2" in capsys.readouterr().out


def test_the_list_names_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    shown = capsys.readouterr().out
    assert [opdef.ge_type for opdef in all_opdefs() if opdef.ge_type not in shown] == []


def test_an_unknown_op_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "NoSuchOp"]) == 1
    assert "no such op: NoSuchOp" in capsys.readouterr().out
