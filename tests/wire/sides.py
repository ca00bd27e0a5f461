"""Helpers: requests, loads and batches to send over a bus, and both of its sides on one server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis

from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Delta, EngineLoad, Generate, Sampling, TokenBatch
from quire.engine.wire.records import ANY_TOKENS, QueueBounds, SyncReply
from quire.engine.wire.token_messages import channel_of
from tests.pace import patience

PLENTY = (1_000_000, 1_000)  # free capacity in tokens and in requests
LONG_MS = 3_600_000  # deadlines and leases: longer than any pause of the machine


def generate(request_id: str, tokens: int = 10, gateway: str = "g1", **more: Any) -> Generate:
    deadline_ms = int(time.time() * 1000) + LONG_MS
    return Generate(request_id, gateway, list(range(tokens)), 5, more.pop("sampling", Sampling()), deadline_ms, **more)


def within(excess: int) -> QueueBounds:
    """Join the on-time lane if its tokens exceed the free capacity by at most `excess`; else no lane."""
    return QueueBounds(excess, -ANY_TOKENS)


LATE = QueueBounds(-ANY_TOKENS)  # join the late lane


def load(engine: str) -> EngineLoad:
    return EngineLoad(engine, "m", "f", 4096, 32000, 16, 100, 100, 0, 0, 0, 0, int(time.time() * 1000))


def batch(request_id: str, first: int, engine: str = "e1") -> TokenBatch:
    return TokenBatch(engine, [Delta(request_id, first, [first])])


def ids(claimed: SyncReply) -> list[str]:
    return [request.id for request in claimed.generates]


async def take(engine: EngineSide, name: str = "e1", tokens: int = PLENTY[0], requests: int = PLENTY[1]) -> SyncReply:
    return await engine.sync([], [], load(name), tokens, requests)


async def read(gateway: GatewaySide, count: int) -> list[TokenBatch]:
    found: list[TokenBatch] = []
    async with asyncio.timeout(patience(100)), contextlib.aclosing(gateway.batches()) as batches:
        async for one in batches:
            found.append(one)
            if len(found) == count:
                break
    return found


async def read_deltas(gateway: GatewaySide, count: int) -> list[Delta]:
    """Read until so many Deltas have come: one sync's for a gateway come in one batch."""
    found: list[Delta] = []
    async with asyncio.timeout(patience(100)), contextlib.aclosing(gateway.batches()) as batches:
        async for one in batches:
            found += one.deltas
            if len(found) >= count:
                break
    return found


async def answer(gateway: GatewaySide, name: str, n: int = 1) -> list[list[int]]:
    """Every token that comes to the gateway, as it counts them: replays dropped, gaps read from the log."""
    tokens: list[list[int]] = [[] for _ in range(n)]
    ended, adding = set[int](), asyncio.Lock()

    async def add(delta: Delta) -> None:
        have = tokens[delta.index]
        async with adding:
            if delta.first > len(have):
                logged = await gateway.log(name, delta.index, len(have), delta.first - len(have))
                assert logged is not None
                have += logged.token_ids
        assert delta.first <= len(have), "a gap"
        have += delta.token_ids[len(have) - delta.first :]
        if delta.finish is not None:
            ended.add(delta.index)

    async def follow() -> None:
        async for batch in gateway.batches():
            for delta in batch.deltas:
                if delta.id == name:
                    await add(delta)

    async with asyncio.timeout(patience(100)):
        following = asyncio.create_task(follow())
        while len(ended) < n:
            await asyncio.sleep(0.02)
            with contextlib.suppress(BusDown):
                if (await gateway.fleet()).forgotten and (found := await gateway.attach(name)) is not None:
                    for index, one in enumerate(found.choices):
                        await add(Delta(name, len(one.token_ids), [], one.finish, index))
        following.cancel()
        return tokens


async def subscribed(client: redis.Redis, namespace: str, gateway: str = "g1") -> None:
    """Wait until a gateway listens to its tokens at this server."""
    channel = f"{{{namespace}}}:tokens:{channel_of(gateway)}"
    async with asyncio.timeout(patience(100)):
        while not client.pubsub_numsub(channel)[0][1]:  # noqa: ASYNC110  (another process's state)
            await asyncio.sleep(0.01)


class Bus:
    """Opens sides on one server and namespace, and closes them all at the end."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace = url, namespace
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def gateway(self, name: str = "g1", url: str = "", **options: Any) -> GatewaySide:
        side = GatewaySide(url or self.url, name, namespace=self.namespace, **options)
        self._closers.append(side.close)
        await side.open()
        return side

    async def engine(
        self, name: str = "e1", url: str = "", lease_ms: int = LONG_MS, late_share: float = 0.1
    ) -> EngineSide:
        side = EngineSide(url or self.url, name, namespace=self.namespace, lease_ms=lease_ms, late_share=late_share)
        self._closers.append(side.close)
        await side.open()
        return side

    def lapse(self, name: str) -> None:
        """Let the lease of this engine lapse now.  Leases of tests last for ever: Redis' clock ends none."""
        with redis.Redis.from_url(self.url) as client:
            assert client.delete(f"{{{self.namespace}}}:lease:{name}") == 1
            client.delete(f"{{{self.namespace}}}:reached")  # a slow test is no Redis that was away

    async def close(self) -> None:
        for closer in reversed(self._closers):
            await closer()
