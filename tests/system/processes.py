"""Real processes of ours, as an operator starts them: `quire serve`, `quire engine`, `quire gateway`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.wire.bus import Fleet, GatewaySide

ROOT = Path(__file__).resolve().parents[2]
QUIRE = [sys.executable, "-m", "service.cli"]
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

    def wait_for(self, words: str, seconds: float = 60.0) -> str:
        """The first line of its output that has these words.  Fails when it ends, or says nothing of the kind."""
        deadline = time.monotonic() + seconds
        while True:
            if found := [line for line in self.said().splitlines() if words in line]:
                return found[0]
            assert self.popen.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def terminate(self, seconds: float = 60.0) -> int:
        """SIGTERM; its exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def ending(processes: list[Process]) -> Iterator[list[Process]]:
    """Whatever stands in the list at the end is stopped, and killed if need be."""
    try:
        yield processes
    finally:
        for process in processes:
            process.popen.terminate()
        for process in processes:
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(url: str, seconds: float = 60.0, *, gateways: int = 1) -> None:
    """Until the gateway there would answer a request.  Of several that share a port each connection gets any one: until
    it is unlikely that one was never asked."""
    deadline = time.monotonic() + seconds
    in_a_row, wanted = 0, 20 * gateways - 19
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                in_a_row += 1
            if in_a_row == wanted:
                return
            continue
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        in_a_row = 0
        assert time.monotonic() < deadline, f"{url} did not become ready"
        time.sleep(0.05)


async def fleet_until(redis_url: str, namespace: str, holds: Callable[[Fleet], bool], seconds: float = 30.0) -> Fleet:
    """The first reading of the engines and their queue of which `holds` is true; fails with the last one read."""
    bus = GatewaySide(redis_url, "observer", namespace=namespace)
    deadline = time.monotonic() + seconds
    try:
        while not holds(fleet := await bus.fleet()):
            assert time.monotonic() < deadline, fleet
            await asyncio.sleep(0.02)
        return fleet
    finally:
        await bus.close()


def at_rest(fleet: Fleet) -> bool:
    """Every block is free or cached, and nothing runs, waits or stands in the queue."""
    return fleet.queued == fleet.queued_tokens == 0 and all(
        load.free_blocks == load.total_blocks and load.running == load.waiting == load.waiting_tokens == 0
        for load in fleet.engines
    )
