"""Models that Quire makes by itself, served by single processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience
from tests.service.conftest import ROOT


@pytest.mark.parametrize("words", [["builtin"], []])
def test_a_gateway_of_its_own_finds_the_model_that_an_engine_makes(
    words: list[str], redis_server: EmbeddedRedis, namespace: str, port: int, tmp_path: Path
) -> None:
    """An engine without MODEL serves the built-in one, so a gateway takes the tokenizer of that one."""
    command = [sys.executable, "-m", "quire.service.app", *words, "--redis-url", redis_server.url]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--namespace", namespace, "--port", str(port)], cwd=ROOT, stderr=file)
    try:
        end = time.monotonic() + patience(60)
        while "listens on" not in log.read_text():
            assert time.monotonic() < end
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=patience(60)) as reply:
            (model,) = json.load(reply)["data"]
        assert model["id"].startswith("quire-builtin")
    finally:
        process.kill()
        process.wait()
