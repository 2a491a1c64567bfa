"""The report: what it counts, how it prints, and that its JSON holds every field."""

import json
from dataclasses import replace

import pytest

from moe_graph.report import KeptLayerError, LayerReport, Reason, Report, first_reasons

REASON = Reason(
    check="one-permutation",
    node="index_3",
    source="model.py:41",
    got="rows ordered by 'perm_1'",
    want="rows ordered by 'perm'",
    hint="gather and combine with the same sort",
)


def two_layers() -> Report:
    rewritten = LayerReport(
        path="model.layers.0.mlp",
        source="model.py:10",
        status="rewritten",
        form="sorted-grouped",
        router="softmax-topk",
        fx_nodes_before=30,
        fx_nodes_after=12,
        ge_nodes={"MoeInitRoutingV2": 1, "GroupedMatmul": 2, "Cast": 3},
    )
    kept = LayerReport(
        path="model.layers.1.mlp", source="model.py:20", status="kept", reasons=[REASON], graph=1
    )
    return Report(layers=[rewritten, kept], graphs=2)


def test_layers_are_told_apart_by_status() -> None:
    report = two_layers()
    assert [layer.path for layer in report.rewritten] == ["model.layers.0.mlp"]
    assert [layer.path for layer in report.kept] == ["model.layers.1.mlp"]


def test_the_table_names_fused_nodes_and_counts_the_rest() -> None:
    text = str(two_layers())
    assert "2 graphs, 1 of 2 MoE layers rewritten" in text
    assert "30 -> 12" in text
    for part in ("MoeInitRoutingV2", "GroupedMatmul x2", "3 other"):
        assert part in text


def test_a_kept_layer_says_what_was_found_wanted_and_what_helps() -> None:
    text = str(two_layers())
    assert "kept model.layers.1.mlp (model.py:20):" in text
    assert (
        "one-permutation at index_3 (model.py:41): got rows ordered by 'perm_1', "
        "want rows ordered by 'perm'; gather and combine with the same sort" in text
    )


def test_a_router_that_stays_is_told_once_for_all_layers_of_one_line() -> None:
    layers = [
        replace(two_layers().layers[0], path=f"layers.{n}.mlp", router_reasons=[REASON])
        for n in range(3)
    ]
    text = str(Report(layers=layers, graphs=1))
    assert text.count("router of layers.0.mlp and 2 more stays:") == 1
    assert text.count("one-permutation at softmax-topk (model.py:41)") == 1


def test_a_report_without_layers_says_so() -> None:
    assert str(Report(graphs=1)) == "moe_graph: 1 graph compiled, no MoE layer found"


def test_json_holds_every_field() -> None:
    data = json.loads(two_layers().to_json())
    assert data["graphs"] == 2
    assert set(data["layers"][0]) == {
        "path",
        "source",
        "status",
        "form",
        "router",
        "reasons",
        "fx_nodes_before",
        "fx_nodes_after",
        "ge_nodes",
        "graph",
        "router_op",
        "router_reasons",
    }
    assert set(data["layers"][1]["reasons"][0]) == {
        "check",
        "node",
        "source",
        "got",
        "want",
        "hint",
    }


def test_a_kept_layer_as_an_error_carries_the_layer_and_its_reasons() -> None:
    layer = two_layers().kept[0]
    error = KeptLayerError(layer)
    assert error.layer is layer
    with pytest.raises(KeptLayerError, match=r"(?s)model.layers.1.mlp.*one-permutation"):
        raise error


def test_one_line_per_kept_layer_for_a_log() -> None:
    assert first_reasons(two_layers().layers) == [f"model.layers.1.mlp: {REASON}"]
