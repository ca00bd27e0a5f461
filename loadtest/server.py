"""Start a server for one measurement: Quire, vLLM from another environment, or llama.cpp, on a free port."""

from __future__ import annotations

import contextlib
import os
import shlex
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

READY_S = 600.0  # maximum wait for a server's start
STOP_S = 60.0  # seconds after which a server is killed; a drain may take 30 s
MODEL_NAME = "bench"
FORKED_ENGINE = "quire-engine"  # process name of an engine that a fork server forked
VLLM_BLOCK = 32  # tokens: the block size that its CPU kernels support
LAST_LINES = 30  # lines of the server's log that are shown when it fails to start


class ServerError(SystemExit):
    """The server did not start.  The message is one line, printed after the last lines of the server's log."""


@dataclass(frozen=True)
class Server:
    port: int
    process: psutil.Process  # the supervisor
    command: str  # without the port, which differs each time

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child(self, name: str) -> psutil.Process:
        """Return the process whose command line has the argument `name`: "quire.service.app" or "quire.engine"."""
        return next(child for child in self.process.children(recursive=True) if name in child.cmdline())


def engine_processes(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return the engines that a `quire serve` runs, the oldest first: the engine, then its spare."""
    found = []
    for child in supervisor.children():
        try:
            if "quire.engine" in child.cmdline() or child.name() == FORKED_ENGINE:
                found.append((child.create_time(), child))
        except psutil.Error:  # it has just ended
            continue
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


@contextlib.contextmanager
def serve(
    model: str,
    *flags: str,
    checkout: Path | None = None,
    log: Path | None = None,
    program: Sequence[str] = ("quire.service.cli",),
) -> Iterator[Server]:
    """Start `quire serve`, wait for /ready, and drain it at the end.  Requests name the model MODEL_NAME.

    `checkout`: directory of another version of the code.  `log`: file that keeps the server's output.
    `program`: module and words in front of `serve`.  Raises ServerError."""
    command = [sys.executable, "-m", *program, "serve", model, "--served-name", MODEL_NAME, *flags]
    shown = " ".join(["quire serve", model, *flags])
    with _serving(command, shown, "/ready", READY_S, checkout=checkout, kept=log) as server:
        yield server


@contextlib.contextmanager
def serve_vllm(python: str, model: str, kv_tokens: int, *flags: str) -> Iterator[Server]:
    """Start vLLM's CPU build with the interpreter `python` and a KV pool of `kv_tokens`.  Raises ServerError."""
    pool = ["--block-size", str(VLLM_BLOCK), "--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK)]
    words = [model, "--dtype", "bfloat16", *pool, "--enable-prompt-tokens-details", *flags]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", *words, "--served-model-name", MODEL_NAME]
    # By default vLLM searches for its model on the hub, and reserves the pool's memory before it reads the pool's size.
    given = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with _serving(command, " ".join(["vllm serve", *words]), "/health", READY_S, given) as server:
        yield server


@contextlib.contextmanager
def serve_llama_cpp(program: Path, gguf: Path, slots: int, context: int, threads: int) -> Iterator[Server]:
    """Start llama.cpp's server with `slots` slots of `context` tokens and `threads` threads.  Raises ServerError."""
    sizes = ["--parallel", slots, "--ctx-size", slots * context, "--threads", threads, "--threads-batch", threads]
    words = ["--model", gguf, *sizes]
    command = [str(word) for word in (program, *words, "--no-webui", "--host", "127.0.0.1", "--alias", MODEL_NAME)]
    with _serving(command, shlex.join(["llama-server", *map(str, words)]), "/health", READY_S) as server:
        yield server


@contextlib.contextmanager
def _serving(
    command: Sequence[str],
    shown: str,
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
        server = Server(port, psutil.Process(process.pid), shown)
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
    """Let the server drain for STOP_S, then kill every process of it that is left."""
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
