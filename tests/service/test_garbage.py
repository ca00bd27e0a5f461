"""Requests free their memory when they end: they leave no reference cycle for the garbage collector.

A busy gateway puts full collections off (service/common/pacing.py), so cycles would stay for minutes.  The one cycle
left is in asyncio's own transport, six small objects a connection.
"""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service.conftest import ROOT
from tests.service.fakes import Served, settled
from tests.service.test_app import EngineMaker, Serve, says

REQUESTS = 20


@pytest.fixture
def saved_garbage() -> Iterator[Callable[[], Counter[str]]]:
    """Call it to get the types of all objects that only the collector found since the test began."""

    def collect() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        gc.set_debug(0)
        gc.garbage.clear()
        return found

    gc.collect()
    gc.disable()
    yield collect
    gc.enable()


async def ask(
    port: int, read: Callable[[asyncio.StreamReader], Awaitable[object]], timeout_s: float, **fields: object
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}X-Request-Timeout: {timeout_s}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await read(reader)
    writer.transport.abort()


@pytest.mark.parametrize("how", ["stream", "whole", "leave", "deadline", "refused"])
async def test_requests_that_ended_leave_no_garbage(
    serve: Serve,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    saved_garbage: Callable[[], Counter[str]],
    how: str,
) -> None:
    served: Served = await serve()
    script = says(byte_level_tokenizer)
    async with engine(script, **({"step_s": 0.2} if how in ("leave", "deadline") else {})):
        await settled(lambda: bool(served.streams.fleet.engines))
        port = int(served.url.rpartition(":")[2])
        fields: dict[str, object] = {"stream": how != "whole"}
        if how == "refused":
            fields["temperature"] = -1

        async def read(reader: asyncio.StreamReader) -> object:
            return await (reader.readuntil(b"data: ") if how == "leave" else reader.read())

        for count in (2, REQUESTS):
            for _ in range(count):
                await ask(port, read, 0.5 if how == "deadline" else 100.0, **fields)
            await settled(lambda: len(served.streams) == 0)
            await asyncio.sleep(0.1)
            found = saved_garbage()
        of_requests = {
            name: many for name, many in found.items() if name.startswith(("service.", "engine.", "aiohttp."))
        }
        assert max(of_requests.values(), default=0) < REQUESTS / 2, of_requests
        assert found["asyncio.selector_events._SelectorSocketTransport"] >= REQUESTS  # what is saved is seen


ALLOCATE_AND_FREE = """
import ctypes
from quire.service.common import memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free f".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
assert memory.return_large_blocks()
bodies = [bytes(2**20) for _ in range(8)]
held = libc.mallinfo2()
assert held.mapped >= 8 * 2**20, held.mapped
del bodies
bodies = [bytes(2**20) for _ in range(8)]  # without the setting the first ones have raised the limit
assert libc.mallinfo2().mapped >= 8 * 2**20
del bodies
assert libc.mallinfo2().mapped < 2**20
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_the_memory_of_large_bodies_goes_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", ALLOCATE_AND_FREE], check=True, cwd=ROOT)
