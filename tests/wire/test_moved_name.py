"""A name moves to another server while old connections stay open and answer: every connection follows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import link
from quire.engine.wire.link import BusDown
from quire.engine.wire.token_messages import channel_of
from tests.pace import paced, patience
from tests.system.chaos.proxy import Proxy
from tests.wire.sides import Bus, batch, generate, ids, load, read, subscribed, take

pytestmark = pytest.mark.every_redis


class Name:
    """Two empty servers; new connections lead to the first, and after `move` to the second."""

    def __init__(self, servers: tuple[EmbeddedRedis, EmbeddedRedis], namespace: str) -> None:
        self.servers, self.namespace, self._at = servers, namespace, 0

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.servers[self._at].url.removeprefix("unix://"))

    def demote(self) -> None:
        with redis.Redis.from_url(self.servers[0].url) as client:
            client.replicaof("127.0.0.1", "9")

    def move(self) -> None:
        self._at = 1

    def freeze(self) -> None:
        pid = self.servers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        pid = self.servers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def name(own_server: EmbeddedRedis, redis_binary: Path, namespace: str) -> AsyncIterator[Name]:
    with EmbeddedRedis(binary=redis_binary) as other:
        yield Name((own_server, other), namespace)


@pytest.mark.parametrize("how", ["demoted before", "demoted after", "frozen"])
async def test_reader_and_bell_follow_a_name_that_moves(name: Name, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Demoted before: new connections lead to the old server for a moment.  Frozen: it does not answer at all."""
    monkeypatch.setattr(link, "BLOCK_MS", 600_000)  # nothing here may come of a wait that ends by itself
    async with Proxy(name.dial) as proxy, asyncio.timeout(patience(100)):
        bus = Bus(f"redis://127.0.0.1:{proxy.port}/0", name.namespace)
        try:
            gateway, engine = await bus.gateway(), await bus.engine()
            await asyncio.wait_for(engine.wait_for_wakeup(), patience(5))  # it is subscribed
            reading = asyncio.create_task(read(gateway, 2))
            await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
            await gateway.fleet()
            ringing = asyncio.create_task(engine.wait_for_wakeup())
            await asyncio.sleep(0.2)
            assert not ringing.done()
            if how == "frozen":
                name.freeze()
                name.move()
            else:
                if how == "demoted after":
                    name.move()
                name.demote()
                await asyncio.sleep(paced(0.5))
                name.move()
            with contextlib.suppress(BusDown):  # raised by the first connection that it tries
                await gateway.fleet()
            await gateway.submit(generate("b"))
            with redis.Redis.from_url(name.servers[1].url) as client:
                await subscribed(client, name.namespace)
            assert (await gateway.fleet()).forgotten  # it may have missed tokens
            await engine.sync([("g1", batch("a", 1))], [], load("e1"), 0, 0)
            assert [one.deltas[0].first for one in await reading] == [0, 1]
            await ringing
            ringing = asyncio.create_task(engine.wait_for_wakeup())
            await asyncio.sleep(0.2)
            await gateway.submit(generate("c"))
            await ringing
            assert ids(await take(engine)) == ["b", "c"]
        finally:
            name.thaw()
            await bus.close()


async def test_what_is_no_token_message_is_skipped(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    bad_id = msgspec.msgpack.encode(["e1", [["g1", [[msgspec.Raw(b"\xb0" + b"\xff" * 16), 0, [1]]]]]])
    with redis.Redis.from_url(own_server.url) as client:
        for message in (b"", b"\xc1", b"\x90", b"\x92\xa0\x91\xc0", bad_id):
            client.publish(f"{{{own_bus.namespace}}}:tokens:{channel_of('g1')}", message)
        await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
        assert [one.deltas[0].first for one in await read(gateway, 1)] == [0]
