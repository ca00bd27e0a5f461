"""No request of at most `max_body_bytes`, of any shape, stalls the event loop of a gateway for more than 50 ms.

On a slower machine the limit is as much longer as a plain loop takes there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.service.config import GatewayConfig
from tests.pace import patience, python_s
from tests.service.conftest import ROOT
from tests.service.fakes import FakeEngine
from tests.service.http import hostile
from tests.service.http.hostile import Hostile
from tests.service.http.watched import Gaps

EngineMaker = Callable[..., FakeEngine]
LIMIT_S = 100 * python_s()  # 50 ms on the machines that the limit was set for
TRIES = 6  # a stall of the gateway repeats, one of a busy machine does not
LIMIT_BYTES = GatewayConfig().max_body_bytes
# `QUIRE_STALLS=FILE` appends a line for each body there: milliseconds of the longest stall, of the longest pause
# between two tokens of the stream, and of the request.
TABLE = os.environ.get("QUIRE_STALLS")


class Watched:
    """A gateway process whose loop is watched, and a stream that it serves all the while."""

    def __init__(self, port: int, gaps: Gaps) -> None:
        self.port, self.gaps = port, gaps
        self.token_gaps: list[tuple[float, float]] = []  # (when, seconds since the token before)

    async def send(self, one: Hostile, patience_s: float = 60.0) -> tuple[str, float]:
        """Status line (empty if the gateway cut the connection) and the longest stall meanwhile."""
        data = await asyncio.to_thread(hostile.request, one, f"127.0.0.1:{self.port}")
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        status = b""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                writer.write(data)
                await writer.drain()
            except ConnectionError:
                pass  # refused while it was sent: the answer may be there nevertheless
            status = await asyncio.wait_for(reader.readline(), patience_s)
            while await asyncio.wait_for(reader.read(2**20), patience_s):
                pass
        writer.close()
        end = time.monotonic()
        await asyncio.sleep(0.03)  # a gap is written when it is over
        return status.decode().strip(), self.gaps.longest(start, end)

    async def read_stream(self) -> None:
        """Keep one stream running, and note how long its tokens take."""
        body = {"model": "tiny", "prompt": "a", "max_tokens": 30_000, "stream": True}
        async with (
            ClientSession() as session,
            session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response,
        ):
            last = time.monotonic()
            async for line in response.content:
                if line.startswith(b"data:"):
                    now = time.monotonic()
                    self.token_gaps.append((now, now - last))
                    last = now


@pytest.fixture
async def watched(
    redis_server: EmbeddedRedis, namespace: str, byte_level_dir: Path, port: int, tmp_path: Path, engine: EngineMaker
) -> AsyncIterator[Watched]:
    watched, control = tmp_path / "watched", tmp_path / "control"
    command = [sys.executable, "-m", "tests.service.http.watched"]
    options = [str(byte_level_dir), "--redis-url", redis_server.url, "--namespace", namespace, "--port", str(port)]
    options += ["--served-name", "tiny", "--late-wait-s", "30", "--drain-s", "1"]
    with _process([*command, str(watched), *options]), _process([*command, str(control)]):
        fake = engine(lambda generate, index: ([5] * generate.max_new_tokens, None), step_s=0.02)
        fake.load_changes = {"max_model_len": 32_768, "total_blocks": 1_000_000, "free_blocks": 1_000_000}
        fake.free_tokens = 10_000_000
        async with fake, ClientSession() as session:
            await _ready(session, f"http://127.0.0.1:{port}/ready")
            found = Watched(port, Gaps(watched, control))
            reading = asyncio.create_task(found.read_stream())
            while not found.token_gaps:
                await asyncio.sleep(0.02)
                assert not reading.done()
            yield found
            assert not reading.done(), "the stream ended"
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _ready(session: ClientSession, url: str) -> None:
    end = time.monotonic() + patience(60)
    while True:
        with contextlib.suppress(OSError):
            async with session.get(url) as response:
                if response.status == 200:
                    return
        assert time.monotonic() < end, "the gateway did not become ready"
        await asyncio.sleep(0.1)


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


@pytest.mark.timeout(600)
async def test_no_body_stalls_the_event_loop(watched: Watched) -> None:
    too_long = []
    bodies = hostile.corpus(LIMIT_BYTES)
    while (one := await asyncio.to_thread(next, bodies, None)) is not None:
        assert len(one.body) <= LIMIT_BYTES, one.name
        begun = time.monotonic()
        status, stall = await watched.send(one)
        took = time.monotonic() - begun
        for _ in range(TRIES - 1):
            if stall <= LIMIT_S:
                break
            status, again = await watched.send(one)
            stall = min(stall, again)
        gap = max((gap for when, gap in watched.token_gaps if when >= begun), default=0.0)
        row = f"{stall * 1000:7.1f} {gap * 1000:7.1f} {took * 1000:8.0f}  {one.path} {one.name}: {status}"
        if TABLE:
            _append(Path(TABLE), row)
        if stall > LIMIT_S:
            too_long.append(f"{one.path}, {one.name}: {stall * 1000:.0f} ms ({status})")
        assert not status.startswith("HTTP/1.1 5"), f"{one.path}, {one.name}: {status}"
    assert not too_long, "\n".join(too_long)


@pytest.mark.timeout(300)
async def test_no_answer_stalls_the_event_loop(watched: Watched) -> None:
    """Log-probabilities of 4,000 prompt tokens with 20 alternatives each, complete and streamed.

    All of them arrive at once, and decoding them is most of the stall that is left: 20 ms for 80,000 alternatives."""
    prompts = [[5] * 1000] * 4
    asked = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20}
    for stream in (False, True):
        body = json.dumps({**asked, "stream": stream}).encode()
        one = Hostile(f"logprobs, stream={stream}", "/v1/completions", body)
        stalls = []
        for _ in range(TRIES):
            status, stall = await watched.send(one)
            assert status.startswith("HTTP/1.1 200")
            stalls.append(stall)
        if TABLE:
            _append(Path(TABLE), f"{one.name}: {stalls}")
        assert min(stalls) <= LIMIT_S, f"{one.name}: {stalls}"
