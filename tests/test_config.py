"""Settings: what is accepted, and the error for everything else."""

from pathlib import Path

import pytest
import torch_npu

from moe_graph import device, emulator
from moe_graph.config import Config, Soc


@pytest.mark.parametrize(
    ("name", "soc"), [("A2", Soc.A2), ("a3", Soc.A3), (" 950 ", Soc.ASCEND950)]
)
def test_a_product_is_known_by_its_short_name(name: str, soc: Soc) -> None:
    assert Soc.parse(name) is soc


def test_an_unknown_product_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"got '910A', want one of 'A2', 'A3', '950'"):
        Soc.parse("910A")


def test_the_environment_names_the_product_and_a2_is_the_default() -> None:
    assert Soc.from_environment({}) is Soc.A2
    assert Soc.from_environment({"MOE_GRAPH_SOC": "A3"}) is Soc.A3


def test_config_takes_the_product_from_its_field_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOE_GRAPH_SOC", "A3")
    assert Config(soc="950").product is Soc.ASCEND950
    assert Config().product is Soc.A3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_miss": "raise"}, r"on_miss: got 'raise', want one of \('warn', 'error', 'ignore'\)"),
        ({"fuse_routers": True}, r"fuse_routers: got True, want one of \('fp32', 'all', 'none'\)"),
        ({"soc": "310P"}, "unsupported product: got '310P'"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**arguments)


def test_the_dump_directory_becomes_a_path(tmp_path: Path) -> None:
    assert Config().dump_path is None
    assert Config(dump_dir=str(tmp_path)).dump_path == tmp_path


@pytest.mark.parametrize(
    ("name", "soc"),
    [("Ascend910B3", Soc.A2), ("Ascend910_9391", Soc.A3), ("Ascend950PR_9599", Soc.ASCEND950)],
)
def test_a_device_tells_its_product(name: str, soc: Soc) -> None:
    assert Soc.of_device(name) is soc


def test_a_device_of_another_product_is_refused() -> None:
    with pytest.raises(ValueError, match="unsupported product: device 'Ascend310P3'"):
        Soc.of_device("Ascend310P3")


def test_without_an_emulation_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_GRAPH_SOC", raising=False)
    monkeypatch.setattr(emulator, "emulated", False)
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda _: "Ascend910_9391")
    device._device_product.cache_clear()
    assert Config().product is Soc.A3
    monkeypatch.setenv("MOE_GRAPH_SOC", "950")
    assert Config().product is Soc.ASCEND950
    device._device_product.cache_clear()
