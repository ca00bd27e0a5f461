"""Start `quire serve`, `quire engine` and `quire gateway` as an operator does; wait for them; read their streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.records import Fleet
from tests import warm
from tests.pace import Patience, patience

ROOT = Path(__file__).resolve().parents[2]
QUIRE = [sys.executable, "-m", "quire.service.cli"]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class Process:
    """One `quire ...`, its output in a file."""

    def __init__(
        self,
        log: Path,
        *words: str,
        command: Sequence[str] = QUIRE,
        env: Mapping[str, str] = ENVIRONMENT,
        cwd: Path = ROOT,
    ) -> None:
        self._log = log
        with log.open("a") as file:
            self.popen = subprocess.Popen(
                [*command, *words],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, words: str, seconds: float = 200.0) -> str:
        """Return the first line of its output with these words.  Fails if the process ends, or after patience()."""
        bound = Patience(seconds)
        while True:
            if found := [line for line in self.said().splitlines() if words in line]:
                return found[0]
            assert self.popen.poll() is None, self.said()
            assert bound.lasts(), self.said()
            time.sleep(0.05)

    def terminate(self, seconds: float = 200.0) -> int:
        """Send SIGTERM and return the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(patience(seconds))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


def children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """Return the processes that this one has started, without the template that forks them (tests/warm.py)."""
    return [one for one in psutil.Process(pid).children(recursive) if not is_template(one)]


def is_template(process: psutil.Process) -> bool:
    """Whether a process of tests/warm.py forks for its parent."""
    try:
        return process.cmdline()[: len(warm.TEMPLATE)] == warm.TEMPLATE
    except psutil.Error:  # it has ended
        return False


@contextmanager
def ending(processes: list[Process]) -> Iterator[list[Process]]:
    """Stop every process that is in the list at the end; kill those that hang."""
    try:
        yield processes
    finally:
        for process in processes:
            process.popen.terminate()
        for process in processes:
            try:
                process.popen.wait(patience(20))
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(url: str, seconds: float = 200.0, *, gateways: int = 1) -> None:
    """Wait until the gateway at `url` is ready.

    If several gateways share the port, each connection reaches a random one.  The wait then ends after so many
    successes in a row that each of them has very likely answered."""
    bound = Patience(seconds)
    in_a_row, wanted = 0, 20 * gateways - 19
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=patience(5)):
                in_a_row += 1
            if in_a_row == wanted:
                return
            continue
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        in_a_row = 0
        assert bound.lasts(), f"{url} did not become ready"
        time.sleep(0.05)


async def fleet_until(redis_url: str, namespace: str, holds: Callable[[Fleet], bool], seconds: float = 200.0) -> Fleet:
    """Return the first state of engines and queue for which `holds` is true.  Fails with the last state read."""
    bus = GatewaySide(redis_url, "observer", namespace=namespace)
    bound = Patience(seconds)
    try:
        while not holds(fleet := await bus.fleet()):
            assert bound.lasts(), fleet
            await asyncio.sleep(0.02)
        return fleet
    finally:
        await bus.close()


def at_rest(fleet: Fleet) -> bool:
    """Return whether every block is free or cached, and no request runs, waits or is queued."""
    return fleet.queued == fleet.queued_tokens == 0 and all(
        load.free_blocks == load.total_blocks and load.running == load.waiting == load.waiting_tokens == 0
        for load in fleet.engines
    )


async def metric(client: aiohttp.ClientSession, url: str, start: str) -> float:
    """Return the sum of a gateway's series whose name and labels match the pattern `start`."""
    async with client.get(f"{url}/metrics") as response:
        page = await response.text()
    return sum(float(value) for value in re.findall(rf"^{start}\S* (\S+)$", page, re.MULTILINE))


async def open_requests(url: str, count: int, seconds: float = 100.0) -> None:
    """Wait until `count` requests are open at a gateway.  Fails with their number after `seconds`."""
    bound = Patience(seconds)
    async with aiohttp.ClientSession() as client:
        while (found := await metric(client, url, "quire_open_requests")) != count:
            assert bound.lasts(), found
            await asyncio.sleep(0.01)


async def sse_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event until [DONE].  Fails for an error event, and for a stream without a [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            assert "error" not in event, event
            yield event
    raise AssertionError("the stream ended without [DONE]")


async def until(
    holds: Callable[[], bool],
    seconds: float = 200.0,
    *,
    reading: Sequence[asyncio.Task[Any]] = (),
    poll_s: float = 0.002,
) -> None:
    """Wait until `holds()` is true.  Fails after `seconds`, or with the exception of a task of `reading`."""
    bound = Patience(seconds)
    while not holds():
        assert bound.lasts(), f"not true after {bound}"
        for task in reading:
            if task.done():
                task.result()
        await asyncio.sleep(poll_s)
