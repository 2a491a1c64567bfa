"""When CANN is emulated, what is refused, and which import orders work."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_graph.config import Soc
from moe_graph.emulator import EmulationError, loader
from moe_graph.emulator.loader import Machine


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("MOE_GRAPH_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**base, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("environ", "machine"),
    [
        ({}, Machine(Soc.A2, 1)),
        ({"MOE_GRAPH_SOC": "a3", "MOE_GRAPH_DEVICES": "2"}, Machine(Soc.A3, 2)),
        ({"MOE_GRAPH_SOC": "950", "MOE_GRAPH_DEVICES": " 16 "}, Machine(Soc.ASCEND950, 16)),
    ],
)
def test_machine_from_environment(environ: dict[str, str], machine: Machine) -> None:
    assert Machine.from_environment(environ) == machine


@pytest.mark.parametrize("devices", ["0", "17", "-1", "two", "", "1.5"])
def test_wrong_number_of_devices_is_refused(devices: str) -> None:
    with pytest.raises(EmulationError, match=r"MOE_GRAPH_DEVICES: got .* want .* 1 to 16"):
        Machine.from_environment({"MOE_GRAPH_DEVICES": devices})


def test_unsupported_product_is_refused() -> None:
    with pytest.raises(EmulationError, match=r"MOE_GRAPH_SOC: .*'310P'.*'A2', 'A3', '950'"):
        Machine.from_environment({"MOE_GRAPH_SOC": "310P"})


@pytest.mark.parametrize(
    ("wish", "cann", "emulate"),
    [("", False, True), ("", True, False), ("0", False, False), ("1", True, True)],
)
def test_should_emulate(
    monkeypatch: pytest.MonkeyPatch, wish: str, cann: bool, emulate: bool
) -> None:
    monkeypatch.setattr(loader, "cann_is_present", lambda environ: cann)
    assert loader.should_emulate({"MOE_GRAPH_EMULATE": wish}) is emulate


def test_unclear_wish_is_refused() -> None:
    with pytest.raises(EmulationError, match="MOE_GRAPH_EMULATE: got 'yes', want '0' or '1'"):
        loader.should_emulate({"MOE_GRAPH_EMULATE": "yes"})


def test_cann_is_present_by_its_environment_or_its_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.cann_is_present({"ASCEND_HOME_PATH": "/usr/local/Ascend"})

    def found(name: str) -> object:
        assert name == "libascendcl.so"
        return object()

    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", found)
    assert loader.cann_is_present({})
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not loader.cann_is_present({})


def test_other_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0.post1")
    with pytest.raises(EmulationError, match=r"torch_npu: got version 2\.9\.0\.post1, want 2\.13"):
        loader.check_torch_npu()


def test_missing_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(EmulationError, match=r"not installed.*pip install 'torch_npu==2\.13"):
        loader.check_torch_npu()


def test_libraries_that_are_not_built_are_named(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match=r"libmoe_graph_cann\.so is missing.*pip install -e"):
        loader.load_libraries(Machine(Soc.A2, 1), tmp_path)


def test_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / loader.CANN_LIBRARY).write_bytes(b"not a library")
    with pytest.raises(EmulationError, match=r"libmoe_graph_cann\.so cannot be loaded"):
        loader.load_libraries(Machine(Soc.A2, 1), tmp_path)


def test_settings_are_checked_before_torch_is_imported() -> None:
    result = run_python("import moe_graph", MOE_GRAPH_SOC="310P")
    assert result.returncode != 0
    assert "EmulationError: MOE_GRAPH_SOC: unsupported product: got '310P'" in result.stderr
    assert "torch/__init__.py" not in result.stderr


def test_product_devices_and_the_one_line() -> None:
    result = run_python(
        "import moe_graph, torch\n"
        "x = torch.arange(3., device='npu:1')\n"
        "print(torch.npu.get_device_name(1), torch.npu.device_count(), (x + x).sum().item())",
        MOE_GRAPH_SOC="A3",
        MOE_GRAPH_DEVICES="2",
    )
    assert result.stdout.splitlines() == ["Ascend910_9391 2 6.0"]
    assert result.stderr.count("running on the emulated Ascend stack (A3, 2 devices") == 1


def test_torch_first_without_autoload() -> None:
    result = run_python(
        "import torch, moe_graph; print(torch.ones(2, device='npu').sum().item())",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        MOE_GRAPH_QUIET="1",
        MOE_GRAPH_SOC="950",
    )
    assert result.stdout.splitlines()[-1] == "2.0"
    assert "emulated Ascend stack" not in result.stderr


def test_torch_first_with_autoload_says_what_to_do() -> None:
    result = run_python(
        "try:\n    import torch\nexcept RuntimeError:\n    pass\nimport moe_graph\n"
    )
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert "import moe_graph before torch" in last
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in last


def test_import_time_is_printed() -> None:
    """The share of the emulation in ``import moe_graph``; printed with ``pytest -s``."""
    result = run_python(
        "import sys, time, types\n"
        "package = types.ModuleType('moe_graph')\n"
        f"package.__path__ = [{str(Path(loader.__file__).parents[1])!r}]\n"
        "sys.modules['moe_graph'] = package\n"
        "start = time.perf_counter()\n"
        "from moe_graph import emulator\n"
        "emulator.activate()\n"
        "activated = time.perf_counter()\n"
        "import torch, torch_npu\n"
        "imported = time.perf_counter()\n"
        "emulator.install_eager_kernels()\n"
        "installed = time.perf_counter()\n"
        "print(f'activate {activated - start:.3f} s', end=', ')\n"
        "print(f'torch and torch_npu {imported - activated:.3f} s', end=', ')\n"
        "print(f'eager kernels {installed - imported:.3f} s')",
        MOE_GRAPH_QUIET="1",
    )
    print(result.stdout.splitlines()[-1])
    assert result.returncode == 0, result.stderr
