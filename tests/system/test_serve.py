"""`quire serve` as an operator meets it: real processes, one-line reasons, restarts and drains."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
QUIRE = [sys.executable, "-m", "service.cli"]


def ended(*argv: str) -> tuple[int, str]:
    done = subprocess.run([*QUIRE, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["serve", "--gateways", "0"], 2, "quire serve: --gateways is '0'; must be a whole number, >= 1, <= 256\n"),
        (["serve", "--port", "x"], 2, "quire serve: --port is 'x'; must be a whole number, >= 0, <= 65535\n"),
    ],
)
def test_a_bad_flag_is_one_line(argv: list[str], status: int, says: str) -> None:
    assert ended(*argv) == (status, says)


def test_a_taken_port_and_an_unreachable_redis_are_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, says = ended("serve", "model", "--port", str(port))
    assert (status, says.count("\n")) == (1, 1)
    assert f"cannot listen on 127.0.0.1:{port}" in says
    status, says = ended("serve", "model", "--port", "0", "--redis-url", "redis://:secret@127.0.0.1:1")
    assert (status, says.count("\n")) == (1, 1)
    assert "Redis at redis://127.0.0.1:1 " in says


def test_a_model_that_is_not_there_ends_it_without_a_traceback() -> None:
    status, says = ended("serve", "/no/such/model", "--port", "0")
    assert status == 1
    assert "cannot start" in says
    assert "Traceback" not in says


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_it_serves_restarts_what_dies_and_drains() -> None:
    serve = subprocess.Popen(
        [*QUIRE, "serve", "--port", "0", "--gateways", "2", "--executor", "scripted"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert serve.stdout is not None
        first = serve.stdout.readline()
        assert first.startswith("serving "), first
        _, model, _, base = first.split()
        ask = {"model": model, "prompt": "def main():", "max_tokens": 8}
        assert get(f"{base}/completions", ask)["usage"]["completion_tokens"] == 8
        children = psutil.Process(serve.pid).children()
        for child in children:  # whatever dies, Redis and its queue included
            child.kill()
        give_up = time.monotonic() + 40
        while True:
            try:
                assert get(f"{base}/completions", ask)["usage"]["completion_tokens"] == 8
                break
            except OSError:
                assert time.monotonic() < give_up
                time.sleep(0.2)
        serve.send_signal(signal.SIGTERM)
        _, log = serve.communicate(timeout=60)
        assert serve.returncode == 0, log
        assert "starting it again" in log
        assert not any(child.is_running() for child in children)
    finally:
        serve.kill()
        serve.communicate()
