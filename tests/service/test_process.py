"""The gateway as a process: how it starts, shares a port, refuses to start, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession
from redis import Redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.service.text.tokenizer import Tokenizer
from tests.pace import Patience, paced, patience, python_s
from tests.service.fakes import FakeEngine, settled

ROOT = Path(__file__).resolve().parents[2]
EngineMaker = Callable[..., FakeEngine]


async def answers(url: str) -> None:
    bound = Patience(100)
    while bound.lasts():
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=patience(5))
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{url} does not answer")


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=patience(5)).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it waited in the backlog of the closing socket
        return True
    return False


def test_importing_the_service_is_quick_and_loads_no_torch() -> None:
    code = (
        "import time, sys; t = time.process_time(); import quire.service.app; used = time.process_time() - t\n"
        "print(used); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    # The minimum of three: another process on this core can only make it slower.
    times = [float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) for _ in range(3)]
    assert min(times) < 2000 * python_s()  # 1 s


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--redis-url", "redis://127.0.0.1:1/0"], "127.0.0.1:1"),
        (["--redis-url", "nonsense://"], "nonsense"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--late-wait-s", "-1"], "--late-wait-s is '-1'; must be a number, >= 0"),
        (["--ttft-target-s", "0"], "--ttft-target-s is '0'; must be a number, > 0"),
        (["--ttft-target-s", "-2"], "--ttft-target-s is '-2'; must be a number, > 0"),
        (["--ttft-target-s", "nan"], "--ttft-target-s is 'nan'; must be a number, > 0"),
        (["--ttft-target-s", "inf"], "--ttft-target-s is inf; must be a finite number"),
        (["--max-queued", "0"], "--max-queued is '0'; must be a whole number, >= 1"),
    ],
)
def test_what_prevents_a_start_is_one_line(
    launch: Callable[..., subprocess.Popen[str]], options: list[str], reason: str
) -> None:
    process = launch(*options)
    _, errors = process.communicate(timeout=patience(30))
    assert process.returncode == 2
    *before, last = errors.splitlines()
    assert last.startswith("quire gateway: ")
    assert reason in last
    assert all(" quire.bus WARNING " in line for line in before), errors  # at most a word on what it waited for


@pytest.mark.system
async def test_a_gateway_that_cannot_read_its_tokens_ends(
    launch: Callable[..., subprocess.Popen[str]], port: int, redis_server: EmbeddedRedis, namespace: str
) -> None:
    """Its user at Redis loses the right to the channel, which no other try mends."""
    user, path = f"gateway-{namespace}", redis_server.url.removeprefix("unix://")
    with Redis.from_url(redis_server.url) as redis:
        redis.execute_command("ACL SETUSER", user, "on", ">secret", "allkeys", "allchannels", "allcommands")
    process = launch("--gateway-id", "broken", "--redis-url", f"unix://{user}:secret@{path}")
    url = f"http://127.0.0.1:{port}"
    await answers(f"{url}/ping")
    with Redis.from_url(redis_server.url) as redis:
        redis.execute_command("ACL SETUSER", user, "resetchannels")  # this closes its connection
    async with ClientSession() as session:
        statuses = {200}
        while process.poll() is None:
            with contextlib.suppress(ClientError):
                async with session.get(f"{url}/ping") as response:
                    statuses.add(response.status)
            await asyncio.sleep(0.2)
    _, errors = process.communicate(timeout=patience(30))
    assert statuses == {200, 503}  # first it tries again, then its liveness probe says so
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("quire gateway: the token reader failed: ")


def test_a_taken_port_is_one_line(launch: Callable[..., subprocess.Popen[str]], port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        _, errors = launch().communicate(timeout=patience(30))
    assert errors.splitlines()[-1].startswith(f"quire gateway: cannot listen on 127.0.0.1:{port}: ")
    assert "Traceback" not in errors


@contextlib.asynccontextmanager
async def slow_engine(engine: EngineMaker, tokenizer: Tokenizer, step_s: float) -> AsyncIterator[FakeEngine]:
    ids = tokenizer._encode("one token at a time ", special=False)
    async with engine(lambda generate, index: (ids * 100, None), step_s=step_s) as fake:
        yield fake


async def test_two_gateways_share_a_port_and_each_gets_its_own_tokens(
    launch: Callable[..., subprocess.Popen[str]], port: int, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    launch()
    launch()
    url = f"http://127.0.0.1:{port}"
    async with slow_engine(engine, byte_level_tokenizer, 0.0) as fake:
        await answers(f"{url}/ready")
        deadline = time.monotonic() + patience(30)
        while len({generate.gateway for generate in fake.seen}) < 2 and time.monotonic() < deadline:
            # A connection of its own each time: the kernel picks the process by its address.
            body = {"model": "tiny", "prompt": "a", "max_tokens": 20}
            async with ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 20
        assert len({generate.gateway for generate in fake.seen}) == 2


@pytest.mark.parametrize("in_time", [True, False])
async def test_sigterm_drains(
    launch: Callable[..., subprocess.Popen[str]],
    port: int,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    in_time: bool,
) -> None:
    process = launch("--drain-s", str(patience(20)) if in_time else "0.2")
    url = f"http://127.0.0.1:{port}"
    async with slow_engine(engine, byte_level_tokenizer, paced(0.02)) as fake, ClientSession() as session:
        await answers(f"{url}/ready")
        body = {"model": "tiny", "prompt": "a", "max_tokens": 60 if in_time else 500, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readline()
            process.send_signal(signal.SIGTERM)
            await settled(lambda: refuses_connections(port))
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        last = json.loads(lines[-2][6:])
        if in_time:
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            assert last["error"]["code"] == "cancelled"
            await settled(lambda: len(fake.aborted) == 1)
        _, errors = await asyncio.to_thread(process.communicate, None, patience(10))
        assert process.returncode == 0
        assert "Traceback" not in errors


@pytest.mark.usefixtures("cold")
def test_the_process_never_loads_torch(launch: Callable[..., subprocess.Popen[str]], port: int) -> None:
    process = launch()
    asyncio.run(answers(f"http://127.0.0.1:{port}/ping"))
    mapped = Path(f"/proc/{process.pid}/maps")
    if not mapped.exists():
        pytest.skip("needs /proc")
    assert "tokenizers" in mapped.read_text()  # it is up, and this file can be read
    assert "libtorch" not in mapped.read_text()
