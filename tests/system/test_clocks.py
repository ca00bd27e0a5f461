"""Processes on machines whose clocks disagree: a timeout is what its client asked for."""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.checkpoints import make_checkpoint
from tests.pace import patience
from tests.ports import free_port
from tests.system.processes import Process, ending, wait_until_ready

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]

STEP_MS = 10


class Machines:
    """An engine, and gateways, each on a clock of its own."""

    def __init__(self, folder: Path, server: EmbeddedRedis, namespace: str, started: list[Process]) -> None:
        self._folder, self._started = folder, started
        self._common = [f"--redis-url={server.url}", f"--namespace={namespace}"]
        self._checkpoint = str(make_checkpoint(folder / "llama", "llama"))
        self.clocks: dict[str, Path] = {}
        self.logs: dict[str, Process] = {}

    def start(self, name: str, module: str, ahead_s: float, *words: str) -> None:
        clock = self.clocks[name] = self._folder / f"{name}.clock"
        clock.write_text(str(ahead_s))
        command = [sys.executable, "-m", "tests.system.skewed", str(clock), module, self._checkpoint]
        self.logs[name] = Process(self._folder / f"{name}.log", *self._common, *words, command=command)
        self._started.append(self.logs[name])

    def engine(self, ahead_s: float) -> int:
        """Returns its metrics port."""
        page = free_port()
        words = [f"--metrics-port={page}", "--executor=scripted", f"--scripted-step-ms={STEP_MS}"]
        self.start("engine", "quire.engine", ahead_s, *words, "--max-model-len=4096", "--kv-blocks=2000")
        return page

    def gateway(self, name: str, ahead_s: float) -> int:
        """Returns its port."""
        port = free_port()
        self.start(name, "quire.service.app", ahead_s, f"--port={port}", f"--gateway-id={name}", "--served-name=tiny")
        return port


@contextmanager
def running(folder: Path, server: EmbeddedRedis, namespace: str) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(folder, server, namespace, stack.enter_context(ending([])))


async def ask(port: int, tokens: int, timeout_s: float) -> tuple[dict[str, Any], float]:
    """An answer, and the seconds it took."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{port}/v1/completions", json=body, headers={"X-Request-Timeout": str(timeout_s)}
        ) as response,
    ):
        return await response.json(), time.monotonic() - began


def skew(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patience(30)) as page:
        return float(re.findall(r"^quire_clock_skew_seconds\S* (\S+)", page.read().decode(), re.MULTILINE)[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine_s", [-60.0, 0.0, 60.0])
async def test_a_skew_of_a_minute_changes_no_timeout(
    tmp_path: Path, redis_server: EmbeddedRedis, namespace: str, engine_s: float
) -> None:
    gateways = {"behind": -60.0, "right": 0.0, "ahead": 60.0} if engine_s else {"behind": -60.0, "ahead": 60.0}
    with running(tmp_path, redis_server, namespace) as machines:
        page = machines.engine(engine_s)
        ports = {name: machines.gateway(name, ahead_s) for name, ahead_s in gateways.items()}
        for name, port in ports.items():
            await asyncio.to_thread(wait_until_ready, f"http://127.0.0.1:{port}")
            answer, _ = await ask(port, 20, 45.0)
            assert answer["choices"][0]["finish_reason"] == "length", answer
            assert answer["usage"]["completion_tokens"] == 20
            answer, took_s = await ask(port, 4000, 3.0)
            assert answer["error"]["code"] == "deadline_exceeded"
            assert took_s >= 2.9
            assert abs(skew(port) - gateways[name]) < 2.0
        assert abs(skew(page) - engine_s) < 2.0
        for name, process in machines.logs.items():
            wrong = engine_s if name == "engine" else gateways[name]
            said = f"60.0 s {'ahead of' if wrong > 0 else 'behind'} Redis' clock"
            assert process.said().count("Redis' clock") == bool(wrong)
            assert not wrong or said in process.said()


@pytest.mark.timeout(300)
async def test_a_clock_that_is_set_ends_no_request(tmp_path: Path, redis_server: EmbeddedRedis, namespace: str) -> None:
    with running(tmp_path, redis_server, namespace) as machines:
        machines.engine(0.0)
        port = machines.gateway("g", 0.0)
        await asyncio.to_thread(wait_until_ready, f"http://127.0.0.1:{port}")
        for name in machines.clocks:
            for ahead_s in (3600.0, -3600.0):
                asked = asyncio.create_task(ask(port, 100, 60.0))
                await asyncio.sleep(0.2)
                machines.clocks[name].write_text(str(ahead_s))
                answer, _ = await asked
                assert answer["choices"][0]["finish_reason"] == "length", answer
                answer, _ = await ask(port, 20, 60.0)
                assert answer["usage"]["completion_tokens"] == 20
                machines.clocks[name].write_text("0")
                await asyncio.sleep(0.1)
