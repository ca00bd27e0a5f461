"""Commands started in a directory of the user's whose files have the names of our packages and of Python's modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.fakes import byte_level
from tests.system.processes import ENVIRONMENT, ROOT, Process, ending

pytestmark = pytest.mark.system
PACKAGES = ("quire", "service", "engine", "csrc", "loadtest", "redis", "torch", "transformers", "pip", "rich")
MODULES = ("json", "types", "typing", "logging", "socket", "signal", "random", "string", "site", "sitecustomize", "re")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's directory."""
    folder = tmp_path / "home"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    for name in MODULES:
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    return folder


@pytest.fixture
def quire(tmp_path: Path) -> list[str]:
    """The console script that an installation makes: its own folder is on the search path, the current one is not."""
    script = tmp_path / "bin" / "quire"
    script.parent.mkdir()
    script.write_text("import sys\nfrom quire.service.cli import main\nsys.exit(main())\n")
    return [sys.executable, str(script)]


def variables() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), "/nonexistent"])}


@pytest.mark.parametrize("words", [["builtin"], ["", "--executor=scripted", "--gateways=2"]])
def test_serve_and_its_clients_run_there(folder: Path, quire: list[str], tmp_path: Path, words: list[str]) -> None:
    model = words[0] or str(byte_level(tmp_path / "model"))
    clients = [
        ["top", "--once", "--interval-s=0.1"],
        ["bench", "--requests=2", "--rate=100", "--prompt-tokens=8", "--max-tokens=4"],
        *([["chat", "--max-tokens=4"]] if model == "builtin" else []),
    ]
    with ending([]) as running:
        serve = Process(
            tmp_path / "log", "serve", model, *words[1:], "--port=0", command=quire, env=variables(), cwd=folder
        )
        running.append(serve)
        url = serve.wait_for("serving ").split()[-1].removesuffix("/v1")
        for client, *options in clients:
            done = subprocess.run(
                [*quire, client, url, *options],
                cwd=folder,
                env=variables(),
                input="hello\n",
                capture_output=True,
                text=True,
                check=False,
            )
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode == 0, (client, done.stderr)
        assert serve.terminate() == 0
        assert "Traceback" not in serve.said(), serve.said()


@pytest.mark.parametrize("words", [["engine", "--executor=scripted"], ["gateway", "--port=0"]])
def test_one_process_runs_there(folder: Path, quire: list[str], tmp_path: Path, words: list[str]) -> None:
    """It gets past its imports: to the Redis that is not there."""
    words = [words[0], str(byte_level(tmp_path / "model")), "--redis-url=redis://127.0.0.1:1/0", *words[1:]]
    done = subprocess.run(
        [*quire, *words],
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Redis" in done.stderr
    assert "Traceback" not in done.stderr
