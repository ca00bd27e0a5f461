"""A Quire of one's own for the length of a measurement: `quire serve` as a process, on a free port."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

READY_S = 120.0


@dataclass(frozen=True)
class Server:
    port: int
    process: psutil.Process  # the supervisor

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child(self, name: str) -> psutil.Process:
        """The process whose command line has `name` as a word: "service.app" or "engine"."""
        return next(child for child in self.process.children(recursive=True) if name in child.cmdline())


@contextlib.contextmanager
def serve(model: str, *flags: str, checkout: Path | None = None) -> Iterator[Server]:
    """Start, wait for /ready, and drain in the end.  The model goes by the name "bench".
    `checkout`: where the code is, if not here."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "serve",
        model,
        "--served-name",
        "bench",
        "--port",
        str(port),
        *flags,
    ]
    with subprocess.Popen(command, stdout=sys.stderr, cwd=checkout) as process:
        server = Server(port, psutil.Process(process.pid))
        try:
            _wait_ready(server.url)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def _wait_ready(url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not become ready in {READY_S:.0f} s")
