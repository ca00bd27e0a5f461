"""Silent connections and slow bodies are bounded in time and number, and probes are answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.service.http.bodies import Scan
from quire.service.text.tokenizer import Tokenizer
from tests.pace import paced, patience
from tests.service.conftest import ROOT
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
PATIENCE_S = 100.0
BODY = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()


class Raw:
    """A client that speaks HTTP by hand, and so may also fall silent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, length: int, body: bytes = b"", path: str = "/v1/completions", headers: str = "") -> None:
        """Announce `length` bytes of a body and send `body` of it."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        self.send(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> int:
        """The status of a GET."""
        self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return (await self.answer())[0]

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), patience(PATIENCE_S))
        first, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await asyncio.wait_for(
            self.reader.readexactly(int(headers.get("content-length", 0))), patience(PATIENCE_S)
        )
        return int(first.split()[1]), headers, body

    async def refusal(self) -> tuple[int, dict[str, Any]]:
        status, _, body = await self.answer()
        return status, json.loads(body)["error"]

    async def closed(self) -> bool:
        """Wait until the gateway closes the connection; False if it says something first."""
        try:
            return await asyncio.wait_for(self.reader.read(1), patience(PATIENCE_S)) == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def raw(served: Served | int) -> AsyncIterator[Raw]:
    port = served if isinstance(served, int) else int(served.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def test_a_silent_connection_is_closed(serve: Serve) -> None:
    served = await serve(header_timeout_s=paced(0.3))
    async with raw(served) as silent:
        assert await silent.closed()
    await settled(lambda: len(served.gateway.connections) == 0)


async def test_a_head_that_trickles_in_is_cut_off(serve: Serve) -> None:
    limit_s = paced(0.5)
    served = await serve(header_timeout_s=limit_s)
    async with raw(served) as slow:
        slow.send(b"GET /ping HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                slow.send(b"X-A: b\r\n")
                await asyncio.sleep(limit_s / 10)  # far below the 128 headers that a head may have

        sending = asyncio.create_task(trickle())
        assert await slow.closed()
        sending.cancel()


async def test_a_kept_connection_may_idle_but_not_forever(serve: Serve) -> None:
    first_s = paced(0.4)
    served = await serve(header_timeout_s=first_s, keepalive_s=4 * first_s)
    async with raw(served) as kept:
        assert await kept.get("/ping") == 200
        await asyncio.sleep(2 * first_s)  # longer than a first request may take
        assert await kept.get("/ping") == 200
        assert await kept.closed()
    async with raw(served) as slow:
        assert await slow.get("/ping") == 200
        slow.send(b"GET /pi")
        assert await slow.closed()


async def test_a_body_that_stops_short_is_refused_in_time(serve: Serve, engine: EngineMaker) -> None:
    limit_s = paced(0.4)
    served = await serve(body_timeout_s=limit_s)
    async with engine(lambda generate, index: ([5], None)), raw(served) as slow:
        slow.post(len(BODY), BODY[:-10])
        status, error = await slow.refusal()
        assert (status, error["code"], error["limit"], error["given"]) == (408, "body_timeout", limit_s, len(BODY) - 10)
        assert await slow.closed()
        assert served.gateway.handlers.bodies.held == 0


async def test_a_long_request_is_not_taken_for_a_silent_one(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    limit_s = paced(0.2)
    served = await serve(header_timeout_s=limit_s, body_timeout_s=limit_s, keepalive_s=limit_s)
    async with engine(lambda generate, index: ([5] * 30, None), step_s=0.15 * limit_s), raw(served) as client:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 30}).encode()
        begun = time.monotonic()
        client.post(len(body), body)
        status, _, answer = await client.answer()
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 30)
        assert time.monotonic() - begun > 2.5 * limit_s


async def test_silent_connections_make_room_for_others(serve: Serve) -> None:
    served = await serve(max_connections=20)
    async with contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(raw(served)) for _ in range(60)]
        async with raw(served) as client:
            assert await client.get("/ping") == 200
            assert await client.get("/v1/models") == 200
        assert len(served.gateway.connections) <= 20
        assert await silent[0].closed()


async def test_only_probes_are_answered_when_every_connection_has_a_request(serve: Serve, engine: EngineMaker) -> None:
    served = await serve(max_connections=3)
    async with engine(lambda generate, index: ([5] * 500, None), step_s=0.05) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.burst = 0  # no answer ends before all others are refused
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 500, "stream": True}).encode()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                (await stack.enter_async_context(raw(served))).post(len(body), body)
            await settled(lambda: len(fake.seen) == 3)
            for path in ("/ping", "/health", "/ready", "/metrics"):
                async with raw(served) as probe:
                    assert await probe.get(path) == 200
                    assert await probe.closed()
            async with raw(served) as late:
                late.post(len(BODY), BODY)
                status, headers, answer = await late.answer()
                error = json.loads(answer)["error"]
                assert (status, error["code"], error["limit"]) == (503, "too_many_connections", 3)
                assert headers["retry-after"] == "1"


async def test_bodies_in_flight_are_bounded_together(serve: Serve, engine: EngineMaker) -> None:
    served = await serve(max_bodies_mib=1)
    async with engine(lambda generate, index: ([5] * generate.max_new_tokens, None)):
        await settled(lambda: bool(served.streams.fleet.engines))
        block = b" " * 900_000
        async with raw(served) as first, raw(served) as second, raw(served) as small:
            first.post(1_000_000, block)
            await settled(lambda: served.gateway.handlers.bodies.held > 800_000)
            second.post(1_000_000, block)
            status, headers, answer = await second.answer()
            error = json.loads(answer)["error"]
            assert (status, error["code"], error["limit"]) == (503, "too_many_bodies", 2**20)
            assert headers["retry-after"] == "1"
            small.post(len(BODY), BODY)
            assert (await small.answer())[0] == 200
        await settled(lambda: served.gateway.handlers.bodies.held == 0)


async def test_a_request_takes_its_place_before_its_body(serve: Serve) -> None:
    served = await serve(max_open=1)
    async with raw(served) as first, raw(served) as second:
        first.post(1000, b" ")
        await settled(lambda: served.gateway.capacity.answering == 1)
        second.post(1000, b" ")
        status, error = await second.refusal()
        assert (status, error["code"], error["limit"]) == (503, "too_many_open", 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_zipped_bodies_are_read(serve: Serve, engine: EngineMaker, encoding: str) -> None:
    zipped = gzip.compress(BODY) if encoding == "gzip" else zlib.compress(BODY)
    served = await serve()
    async with engine(lambda generate, index: ([5], None)):
        await settled(lambda: bool(served.streams.fleet.engines))
        async with raw(served) as client:
            client.post(len(zipped), zipped, headers=f"Content-Encoding: {encoding}\r\n")
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ("Content-Encoding: gzip\r\nContent-Length: 100\r\n", gzip.compress(b"a" * 5000, mtime=0) + b"x" * 100, 400),
        ("Content-Encoding: gzip\r\nContent-Length: 9\r\n", b"no gzip!!", 400),
        ("Content-Encoding: gzip\r\nContent-Length: 20\r\n", gzip.compress(b"a" * 5000, mtime=0)[:20], 400),
        ("Content-Encoding: snappy\r\nContent-Length: 2\r\n", b"{}", 415),
        ("Transfer-Encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n", 400),
    ],
)
async def test_a_broken_transfer_is_the_clients_error(serve: Serve, headers: str, body: bytes, expected: int) -> None:
    served = await serve()
    async with raw(served) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n"
        client.send(head.encode() + body[:100])
        assert (await client.answer())[0] == expected


def counted(text: str) -> tuple[int, int]:
    """What `Scan` counts, one character at a time."""
    structures = values = 0
    in_string = escaped = False
    for char in text:
        if in_string and escaped:
            escaped = False
        elif in_string and char == "\\":
            escaped = True
        elif char == '"':
            structures += not in_string
            in_string = not in_string
        elif not in_string:
            structures += char in "{["
            values += char == ","
    return structures, values


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab\\"{}[],é\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a\\",'), inner, max_size=4),
)


@given(value=JSON, cuts=st.lists(st.integers(1, 9), min_size=1))
def test_a_scan_counts_the_same_wherever_a_body_is_cut(value: Any, cuts: list[int]) -> None:
    text = json.dumps(value)
    scan, data, turn = Scan(), text.encode(), 0
    while data:
        size = cuts[turn % len(cuts)]
        scan.feed(data[:size])
        data, turn = data[size:], turn + 1
    assert (scan.structures, scan.values) == counted(text)


@pytest.mark.timeout(300)
async def test_more_silent_connections_than_the_soft_limit_of_files(
    redis_server: EmbeddedRedis, namespace: str, byte_level_dir: Path, port: int, tmp_path: Path
) -> None:
    """The soft limit is raised at start, and logged."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the hard limit of open files is too low")
    command = [sys.executable, "-m", "quire.service.app", str(byte_level_dir), "--redis-url", redis_server.url]
    command += ["--namespace", namespace, "--port", str(port), "--header-timeout-s", "60"]
    log = tmp_path / "log"
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(ours[0], 2048), hard))
    with log.open("w") as file:
        limits = ["prlimit", "--nofile=1024:4096"]
        process = subprocess.Popen([*limits, *command], cwd=ROOT, stderr=file)  # noqa: ASYNC220  (it does not wait)
    try:
        end = time.monotonic() + patience(60)
        while "listens on" not in log.read_text():
            assert time.monotonic() < end
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
        assert (
            "accepts 3904 connections at once; the limit of open files was raised from 1024 to 4096" in log.read_text()
        )
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(1100):
                await stack.enter_async_context(raw(port))
            async with raw(port) as client:
                assert await client.get("/ping") == 200
    finally:
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, ours)
