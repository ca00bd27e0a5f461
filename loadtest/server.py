"""A server of one's own for the length of a measurement: Quire, or vLLM from another environment, on a free port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

QUIRE_READY_S, VLLM_READY_S = 120.0, 300.0
STOP_S = 60.0  # a drain may take 30 s
MODEL_NAME = "bench"
VLLM_BLOCK = 32  # tokens: what its CPU kernels take
LAST_LINES = 30  # of a server's log that explain why it failed


class ServerError(SystemExit):
    """It did not start; one line, after its own last words on stderr.  Ends the program unless somebody goes on."""


@dataclass(frozen=True)
class Server:
    port: int
    process: psutil.Process  # the supervisor
    command: str  # without the port, which is another one each time

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child(self, name: str) -> psutil.Process:
        """The process whose command line has `name` as a word: "service.app" or "engine"."""
        return next(child for child in self.process.children(recursive=True) if name in child.cmdline())


@contextlib.contextmanager
def serve(model: str, *flags: str, checkout: Path | None = None, log: Path | None = None) -> Iterator[Server]:
    """Quire: start, wait for /ready, and drain in the end.  The model goes by MODEL_NAME.  `checkout`: where the code
    is, if not here.  `log`: the file to write the server's output to, if it is to be kept.  Raises ServerError."""
    command = [sys.executable, "-m", "service.cli", "serve", model, "--served-name", MODEL_NAME, *flags]
    said = " ".join(["quire serve", model, *flags])
    with _serving(command, said, "/ready", QUIRE_READY_S, checkout=checkout, kept=log) as server:
        yield server


@contextlib.contextmanager
def serve_vllm(python: str, model: str, kv_tokens: int, *flags: str) -> Iterator[Server]:
    """vLLM's CPU build under the interpreter that has it, with a KV pool of `kv_tokens`.  Raises ServerError."""
    pool = ["--block-size", str(VLLM_BLOCK), "--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK)]
    words = [model, "--dtype", "bfloat16", *pool, "--enable-prompt-tokens-details", *flags]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", *words, "--served-model-name", MODEL_NAME]
    # It looks for its model on the hub, and reserves memory for its pool before it hears how large that is.
    given = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with _serving(command, " ".join(["vllm serve", *words]), "/health", VLLM_READY_S, given) as server:
        yield server


@contextlib.contextmanager
def _serving(
    command: Sequence[str],
    said: str,
    ready: str,
    ready_s: float,
    given: dict[str, str] | None = None,
    checkout: Path | None = None,
    kept: Path | None = None,
) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        kept.open("w+b") if kept else tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env=os.environ | (given or {}), cwd=checkout
        ) as process,
    ):
        server = Server(port, psutil.Process(process.pid), said)
        try:
            try:
                _wait(server.url + ready, process, ready_s)
            except ServerError:
                log.seek(0)
                print(*log.read().decode(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
                raise
            yield server
        finally:
            _stop(process)


def _wait(url: str, process: subprocess.Popen[bytes], ready_s: float) -> None:
    end = time.monotonic() + ready_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise ServerError(f"{url} did not answer in {ready_s:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let it drain; whatever of it is left afterwards is killed."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
