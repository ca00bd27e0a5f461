"""How `python -m quire.engine` ends when it cannot start: one line, exit status 2, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience

ROOT = Path(__file__).resolve().parent.parent


def start(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.engine", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=patience(250), check=False)


def test_without_redis_it_says_so_before_it_loads_the_model() -> None:
    """It loaded the model first, which took 27 s."""
    ended = start("/no/such/model", "--redis-url=redis://127.0.0.1:1/0")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "Redis at redis://127.0.0.1:1" in line


def test_without_a_compiler_it_says_so_in_one_line(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    where = f"--redis-url={redis_server.url}"
    ended = start("--device=cpu", where, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), CXX="g++")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("quire engine: cannot build the kernels: no C++ compiler, 'g++' is not on PATH")


@pytest.mark.parametrize("option", ["--request-log"])
def test_a_log_that_cannot_be_written_is_named(option: str, tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "log"
    ended = start("--executor=scripted", f"{option}={path}")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("quire engine: cannot write a log: ")
    assert str(path) in line
