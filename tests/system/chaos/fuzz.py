"""Hostile clients: random and mutated requests on every endpoint of real gateways.

    python -m tests.system.chaos fuzz [--requests 100000] [--seed 1] [--model tiny|scripted] [--at-once 32]

Two gateways and an engine on a Redis of their own.  What must hold, however hostile the clients are (see shots.py):

- every request in order is answered, with no status of 500 and up but 503 and 504 with their codes;
- the event loop of a gateway never computes for more than --stall-ms in one go;
- at the end nothing runs or waits, the block accounting balances, memory is back at its level, no log has a traceback.

Exit status 1 otherwise, with the number of each request that failed: --first N --requests 1 sends it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.checkpoints import make_checkpoint
from tests.pace import patience
from tests.ports import free_port
from tests.system.chaos.shots import Shooter, Shot
from tests.system.ending import stalls
from tests.system.processes import Process, at_rest, ending, fleet_until, wait_until_ready

ANSWER_S = 60.0  # an answer takes no longer; the timeouts asked for are shorter
# Codes of answers with a status of 500 and up, and of the error that ends a stream.
DOCUMENTED = {
    *(("503", code) for code in ("no_engine", "cancelled", "shutting_down", "queue_unavailable")),
    *(("503", code) for code in ("too_many_open", "too_many_bodies", "too_many_connections")),
    *(("503", code) for code in ("answer_incomplete", "request_lost")),
    ("504", "deadline_exceeded"),
}
STREAM_ENDS = {"deadline_exceeded", "cancelled", "shutting_down", "stream_gone"}
SAY_S, LOOK_S = 30.0, 1.0  # between two lines of progress; between two looks at what a run left
UNSOUND_S = 0.5  # so long a client whose HTTP is not in order waits for an answer
OPTIONS = {
    "scripted": ["--executor=scripted", "--scripted-step-ms=1"],
    "tiny": ["--dtype=float32", "--threads=1"],
}
NO_LOGPROBS = frozenset({"logprobs", "top_logprobs"})  # the scripted engine does not send them
RETAIN_S = 15
SLACK_MIB = {"gateway": 48, "engine": 32, "redis": 8}  # more than this is a leak
WARM_UP = 300  # requests, after which memory is at its level
BACK_S = 90.0  # seconds until memory returns to it
IDS = 200  # event ids kept for resuming


@dataclass
class Found:
    """What came of a run."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)  # MiB before and after
    stall_s: dict[str, float] = field(default_factory=dict)  # gateway -> upper bound of its highest non-empty bucket
    busy_s: dict[str, float] = field(default_factory=dict)
    ping_s: float = 0.0
    seconds: float = 0.0


class Target:
    """Gateways, their engine and their Redis."""

    def __init__(self, folder: Path, server: EmbeddedRedis, model: str, started: list[Process]) -> None:
        self.url, self.server = server.url, server
        self.ports, self.pages = [free_port(), free_port()], [free_port(), free_port()]
        self.engine_page = free_port()
        checkpoint = str(make_checkpoint(folder / "llama", "llama"))
        shared = [checkpoint, f"--redis-url={server.url}"]
        self.engine = Process(
            folder / "engine.log",
            *("engine", *shared, "--engine-id=e0", "--max-model-len=512", "--kv-blocks=600", "--max-seqs=64"),
            *(f"--metrics-port={self.engine_page}", *OPTIONS[model]),
        )
        self.gateways = [
            Process(
                folder / f"gateway{at}.log",
                *("gateway", *shared, f"--port={port}", f"--metrics-port={page}", f"--gateway-id=g{at}"),
                *("--served-name=tiny", "--default-timeout-s=10", "--max-timeout-s=10"),
                *("--late-wait-s=5", f"--retain-s={RETAIN_S}", "--resume-s=2"),
            )
            for at, (port, page) in enumerate(zip(self.ports, self.pages, strict=True))
        ]
        started += [self.engine, *self.gateways]

    @property
    def processes(self) -> dict[str, Process]:
        return {"engine": self.engine, **{f"gateway{at}": one for at, one in enumerate(self.gateways)}}

    def memory(self) -> dict[str, float]:
        """MiB of each process, and of what Redis holds."""
        found = {name: psutil.Process(one.popen.pid).memory_info().rss / 2**20 for name, one in self.processes.items()}
        with redis.Redis.from_url(self.url) as client:
            info: dict[str, int] = client.info("memory")
        return {**found, "redis": info["used_memory"] / 2**20}


async def fire(shot: Shot, port: int) -> bytes:
    """Send a shot and return the response.  Raises TimeoutError."""
    async with asyncio.timeout(patience(ANSWER_S)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for at, part in enumerate(shot.parts):
                if at:
                    await asyncio.sleep(shot.pause_s)
                writer.write(part)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            if shot.leave_after == 0:
                await asyncio.sleep(shot.pause_s)
                return b""
            got = bytearray()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if shot.sound else UNSOUND_S):
                    while (shot.leave_after < 0 or len(got) < shot.leave_after) and (block := await reader.read(65536)):
                        got += block
            return bytes(got)
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


def judge(shot: Shot, answer: bytes) -> tuple[str, str]:
    """The status of an answer ('closed' without one), and what is wrong with it, or ''."""
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    if found is None:
        owed = shot.sound and shot.leave_after < 0
        return "closed", "no answer" if owed else ""
    status, code = found[1].decode(), re.search(rb'"code":"?([\w]+)', answer.partition(b"\r\n\r\n")[2])
    name = code[1].decode() if code else ""
    if status >= "500" and (status, name) not in DOCUMENTED and not (status == "503" and b"/ready" in shot.parts[0]):
        return status, f"status {status}, code {name or 'none'}"
    if (
        status == "200"
        and b"text/event-stream" in answer[:1000]
        and (error := re.search(rb'data: {"error":.*', answer))
    ):
        return status, "" if name in STREAM_ENDS else f"a stream ended in {error[0][:200]!r}"
    return status, ""


class Probe(threading.Thread):
    """Asks /ping every 10 ms; its longest wait also holds what other processes took of the machine."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._url, self._ended = f"http://127.0.0.1:{port}/ping", threading.Event()
        self.longest_s = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._ended.wait(0.01):
            began = time.monotonic()
            try:
                with urllib.request.urlopen(self._url, timeout=patience(ANSWER_S)) as answer:
                    answer.read()
            except OSError as error:
                self.failures.append(f"/ping: {error}")
                return
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Fuzz:
    """One run."""

    def __init__(self, target: Target, shooter: Shooter, stall_s: float) -> None:
        self._target, self._shooter, self._stall_s = target, shooter, stall_s
        self._recent: deque[str] = deque(maxlen=IDS)
        self.found = Found()

    async def run(self, numbers: Iterator[int], at_once: int) -> None:
        async def client() -> None:
            for number in numbers:
                await self._one(number, self._shooter.shot(number))

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _one(self, number: int, shot: Shot) -> None:
        self.found.requests += 1
        try:
            answer = await fire(shot, self._target.ports[number % 2])
        except TimeoutError:
            self._fail(number, shot, "neither answered nor closed")
            return
        status, wrong = judge(shot, answer)
        self.found.statuses[status] += 1
        for event in re.findall(rb"\nid: (\S+)", answer)[:: 1 + number % 7]:
            self._recent.append(event.decode())
        self._shooter.ids = list(self._recent)
        if wrong:
            self._fail(number, shot, wrong)

    def _fail(self, number: int, shot: Shot, wrong: str) -> None:
        sent = b"".join(shot.parts)
        self.found.failures.append(f"request {number}, {shot.name} {shot.notes}: {wrong}\n    {sent[:1500]!r}")

    def compare(self, before: list[dict[str, dict[float, float]]], after: list[dict[str, dict[float, float]]]) -> None:
        """Stalls of the gateways since `before`."""
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            grown = {
                kind: max((border for border, count in other[kind].items() if count > one[kind][border]), default=0.0)
                for kind in ("stall", "busy")
            }
            self.found.stall_s[f"gateway{at}"], self.found.busy_s[f"gateway{at}"] = grown["stall"], grown["busy"]
            if grown["busy"] > self._stall_s:
                self.found.failures.append(f"gateway{at} computed for up to {grown['busy']} s in one turn of its loop")

    async def settle(self, before: dict[str, float]) -> None:
        """Everything is at rest again, and memory at its level."""
        await fleet_until(self._target.url, "quire", at_rest, BACK_S)
        until = time.monotonic() + patience(BACK_S)
        while leaks := self._leaks(before, after := self._target.memory()):
            if time.monotonic() > until:
                self.found.failures += leaks
                break
            await asyncio.sleep(LOOK_S)
        self.found.memory = {name: (before[name], after[name]) for name in before}
        url = f"http://127.0.0.1:{self._target.engine_page}/debug/accounting"
        asked = urllib.request.Request(url, method="POST")

        def check() -> str:
            try:
                with urllib.request.urlopen(asked, timeout=patience(60)) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                return error.read().decode()

        if not json.loads(said := await asyncio.to_thread(check)).get("balanced"):
            self.found.failures.append(f"block accounting: {said}")
        for name, process in self._target.processes.items():
            if process.popen.poll() is not None:
                self.found.failures.append(f"{name} ended")
            if "Traceback" in (text := process.said()):
                at = text.index("Traceback")
                count = text.count("Traceback (most recent")
                self.found.failures.append(
                    f"{name} logged {count} tracebacks, first: {text[max(0, at - 300) : at + 3000]}"
                )

    def _leaks(self, before: dict[str, float], after: dict[str, float]) -> list[str]:
        return [
            f"{name} has grown from {before[name]:.0f} to {after[name]:.0f} MiB"
            for name in before
            if after[name] > before[name] + SLACK_MIB[name.rstrip("01")]
        ]


async def fuzz(
    folder: Path,
    server: EmbeddedRedis,
    *,
    requests: int,
    seed: int,
    first: int = 0,
    at_once: int = 32,
    model: str = "tiny",
    stall_s: float = 0.05,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Start everything, send `requests` shots, let it come to rest, and say what was wrong."""
    with contextlib.ExitStack() as stack:
        target = Target(folder, server, model, stack.enter_context(ending([])))
        for port in target.ports:
            await asyncio.to_thread(wait_until_ready, f"http://127.0.0.1:{port}")
        run = Fuzz(target, Shooter(seed, NO_LOGPROBS if model == "scripted" else frozenset()), stall_s)
        if requests > WARM_UP:
            await run.run(iter(range(first + requests, first + requests + WARM_UP)), at_once)
        await fleet_until(target.url, "quire", at_rest, BACK_S)
        before, stalled = target.memory(), [await asyncio.to_thread(stalls, page) for page in target.pages]
        probe = Probe(target.ports[0])
        probe.start()
        began, numbers = time.monotonic(), iter(range(first, first + requests))
        progress = asyncio.create_task(_progress(run.found, say))
        await run.run(numbers, at_once)
        progress.cancel()
        run.found.seconds = time.monotonic() - began
        probe.stop()
        run.found.ping_s = probe.longest_s
        run.found.failures += probe.failures
        run.compare(stalled, [await asyncio.to_thread(stalls, page) for page in target.pages])
        await run.settle(before)
    return run.found


async def _progress(found: Found, say: Callable[[str], None]) -> None:
    for _ in itertools.count():
        await asyncio.sleep(SAY_S)
        say(f"{found.requests} requests, {len(found.failures)} failures")


def table(found: Found) -> str:
    """For people."""
    rows = [
        f"{found.requests} requests in {found.seconds:.0f} s: "
        + ", ".join(f"{count} x {status}" for status, count in sorted(found.statuses.items())),
        "computed at most, in one turn of the loop: "
        + ", ".join(
            f"{name} {border:g} s (late by up to {found.stall_s[name]:g} s)" for name, border in found.busy_s.items()
        )
        + f"; longest /ping {found.ping_s:.3f} s",
        "MiB before and after: "
        + ", ".join(f"{name} {before:.0f} -> {after:.0f}" for name, (before, after) in found.memory.items()),
        f"failures: {len(found.failures)}",
        *found.failures[:50],
    ]
    return "\n".join(rows)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=32, help="connections")
    parser.add_argument("--model", choices=sorted(OPTIONS), default="tiny", help="tiny: a real checkpoint")
    parser.add_argument("--stall-ms", type=float, default=50.0)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        found = asyncio.run(
            fuzz(
                Path(folder),
                server,
                requests=options.requests,
                seed=options.seed,
                first=options.first,
                at_once=options.at_once,
                model=options.model,
                stall_s=options.stall_ms / 1000,
                say=lambda line: print(line, flush=True),
            )
        )
    print(table(found))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
