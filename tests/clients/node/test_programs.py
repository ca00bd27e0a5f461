"""Programs of npm with their defaults, each against a scripted model: nothing is refused, the tool really runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clients.script import FINAL, MODEL

HERE = Path(__file__).parent
PACKAGES = Path(os.environ["QUIRE_NODE"])
URL = os.environ["QUIRE_SCRIPTED_URL"]
CODEX = f"""
model = "{MODEL}"
model_provider = "quire"
[model_providers.quire]
name = "Quire"
base_url = "{URL}/v1"
wire_api = "responses"
env_key = "QUIRE_KEY"
"""


def calls() -> list[dict[str, Any]]:
    """The requests that the server has seen so far."""
    with urllib.request.urlopen(f"{URL}/calls") as response:
        found: list[dict[str, Any]] = json.load(response)
    return found


def run(program: str, *words: str, home: Path, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a program in an empty directory; return what it printed and what it asked.  Nothing was refused."""
    work = home / "work"
    work.mkdir(parents=True)
    before = len(calls())
    done = subprocess.run(
        [program, *words],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    made = calls()[before:]
    refused = [call for call in made if call["status"] >= 400]
    assert not refused, [(call["path"], call["status"], call["answer"][:500]) for call in refused]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, made


def test_claude_code(tmp_path: Path) -> None:
    program = str(PACKAGES / "node_modules" / ".bin" / "claude")
    printed, made = run(
        program,
        *("-p", "Make the file", "--model", MODEL, "--allowedTools", "Bash"),
        home=tmp_path,
        ANTHROPIC_BASE_URL=URL,
        ANTHROPIC_API_KEY="none",
    )
    assert printed.strip() == FINAL
    assert (tmp_path / "work" / "made.txt").read_text() == "kiwi\n"
    assert sum(call["path"].startswith("/v1/messages") for call in made) >= 2


def test_codex(tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX)
    program = str(PACKAGES / "node_modules" / ".bin" / "codex")
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")  # its sandbox needs user namespaces
    printed, made = run(program, "exec", *flags, "Make the file", home=tmp_path, QUIRE_KEY="none")
    assert FINAL in printed
    assert (tmp_path / "work" / "made.txt").read_text() == "kiwi\n"
    assert sum(call["path"].startswith("/v1/responses") for call in made) >= 2
    assert any("namespace" in call["body"] for call in made)  # else the program has changed, and this shows less


@pytest.mark.parametrize("provider", ["responses", "chat", "compatible", "anthropic"])
def test_ai_sdk(tmp_path: Path, provider: str) -> None:
    script = PACKAGES / f"{provider}.mjs"  # next to the packages, from where modules are resolved
    shutil.copy(HERE / "ai_sdk.mjs", script)
    printed, made = run("node", str(script), URL, MODEL, provider, home=tmp_path, AI_SDK_LOG_WARNINGS="false")
    told = json.loads(printed.splitlines()[-1])
    assert told["first"] == told["second"] == told["whole"] == FINAL
    assert told["streamed"].endswith(FINAL)
    if provider != "chat":  # the provider reads no reasoning there
        assert told["thoughts"][0] == "I need the tool run_shell."
    assert told["object"] == {"ages": {"ann": "7"}}
    assert (tmp_path / "work" / "made.txt").read_text() == "kiwi\n"
    if provider == "responses":
        assert any("item_reference" in call["body"] for call in made)
