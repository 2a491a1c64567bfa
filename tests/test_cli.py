"""``python -m moe_graph``: most commands in this process, the others in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from moe_graph.cli import main

Script = Callable[[str], Path]

BLOCK = """
    import sys
    import torch
    from tests.models.blocks import moe_block, tokens
    block = torch.compile(moe_block().npu())
    print("result", tuple(block(tokens().npu()).shape), sys.argv[1:])
"""
COUNTING = """
    import torch

    def count(x):
        return torch.histc(x * 2, bins=4)

    torch.compile(count)(torch.ones(3).npu())
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script and returns its path."""
    torch._dynamo.reset()

    def write(text: str) -> Path:
        path = tmp_path / "user_script.py"
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    return write


def in_a_new_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command: Sequence[str | Path] = (sys.executable, "-m", "moe_graph", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_doctor_shows_versions_product_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("Python", "torch_npu", torch.__version__, "CANN", "emulated", "A2", "devices"):
        assert part in text


def test_doctor_lists_ops_without_a_lowering(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", str(script(COUNTING))]) == 1
    text = capsys.readouterr().out
    assert "aten.histc.default" in text
    assert "no converter" in text
    assert "user_script.py:4" in text


def test_doctor_is_content_with_a_layer_that_is_rewritten(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(script(BLOCK))]) == 0
    assert "every op of 1 graph(s) has a lowering" in capsys.readouterr().out


def test_explain_prints_the_table(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(script(BLOCK)), "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "result (2, 5, 32) ['--steps', '3']" in text
    assert "1 graph, 1 of 1 MoE layer rewritten" in text


def test_explain_prints_json_and_nothing_else(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--json", str(script(BLOCK))]) == 0
    captured = capsys.readouterr()
    (layer,) = json.loads(captured.out)["layers"]
    assert layer["status"] == "rewritten"
    assert "result" in captured.err


@pytest.mark.parametrize("command", ["doctor", "explain"])
def test_a_script_that_compiles_nothing(
    command: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(script("print('nothing')"))]) == 2
    assert "user_script.py compiled nothing: wrap its model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "explain", "run"])
def test_a_script_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main([command, "no/such/script.py"])
    assert info.value.code == 2
    assert "no such script: no/such/script.py" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["explain"], ["run"], ["fly"]])
def test_a_call_that_makes_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert "usage: python -m moe_graph" in capsys.readouterr().err


def test_an_error_of_the_script_is_its_own(script: Script) -> None:
    arguments, path = list(sys.argv), list(sys.path)
    with pytest.raises(ZeroDivisionError):
        main(["run", str(script("1 / 0"))])
    assert sys.argv == arguments
    assert sys.path == path


def test_run_starts_a_script_that_imports_torch_first(script: Script) -> None:
    path = script("""
        import sys
        import torch
        import helper_of_the_script
        assert __name__ == "__main__"
        print((torch.ones(2).npu() + 1).tolist(), sys.argv[1:])
        sys.exit(3)
    """)
    (path.parent / "helper_of_the_script.py").touch()
    done = in_a_new_process("run", path, "--flag", "value")
    assert (done.returncode, done.stdout) == (3, "[2.0, 2.0] ['--flag', 'value']\n"), done.stderr


def test_the_command_line_of_a_new_process(script: Script) -> None:
    done = in_a_new_process("doctor", script(COUNTING))
    assert done.returncode == 1, done.stderr
    assert "aten.histc.default" in done.stdout
