"""The entry point: every command is listed, starts by its name, and some by their module as results cite them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from quire.loadtest.__main__ import COMMANDS, main
from quire.loadtest.studies import __main__ as studies
from tests.pace import patience

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in COMMANDS.items():
        assert [line for line in lines if line.split()[:1] == [name]] == [f"  {name:14}{text}"]
        assert len(text) < 100


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "kernels"])
def test_every_command_describes_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m quire.loadtest {name} ")
    module = importlib.import_module(f"quire.loadtest.{COMMANDS[name][0]}")
    assert module.__doc__ is not None
    assert f"python -m quire.loadtest {name} " in module.__doc__  # its example
    assert "--help" in shown


def test_help_lists_every_study_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        studies.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in studies.STUDIES.items():
        assert [line for line in lines if line.split()[:1] == [name]] == [f"  {name:18}{text}"]


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_study_describes_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(studies.STUDIES[name][0])
    assert module.__doc__ is not None
    assert f"python -m quire.loadtest.studies {name}" in module.__doc__  # its example
    if hasattr(module, "add_arguments"):  # others also take every option of an engine
        with pytest.raises(SystemExit, match="0"):
            studies.main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: python -m quire.loadtest.studies {name} ")


def test_an_unknown_command_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["capacitee"])
    assert "'capacitee'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["recovery", "throughput"])
def test_a_command_also_starts_as_a_module(module: str) -> None:
    words = [sys.executable, "-m", f"quire.loadtest.{module}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m quire.loadtest {module.replace('_', '-')} " in done.stdout


def test_shapes_writes_a_config(tmp_path: Path) -> None:
    assert studies.main(["shapes", "qwen3-0.6b", str(tmp_path / "made")]) == 0
    assert '"model_type": "qwen3"' in (tmp_path / "made" / "config.json").read_text()


@pytest.mark.parametrize("module", ["throughput", "recovery"])
@pytest.mark.parametrize("name", ["/tmp/result", "a/b", "..", ""])
def test_a_name_that_is_no_file_name_is_refused_before_anything_is_measured(
    module: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["llama-8b"] if module == "recovery" else []
    with pytest.raises(SystemExit, match="2"):
        main([module, *words, "--name", name])
    assert f"argument --name: {name!r} is no file name" in capsys.readouterr().err
