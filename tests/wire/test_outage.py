"""Redis stops answering a running engine: generation continues, and no output is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import redis

from quire.engine.bus_thread import BusThread
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.config import EngineConfig
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, scripted_token
from quire.engine.loop import Engine
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Finish, Generate, Sampling
from tests.pace import paced_ms, patience
from tests.wire.sides import LONG_MS, Bus, answer

INFO = ModelInfo("scripted", "f00d", 100, 4096, [0], 64)
LIMIT_S = 200.0
pytestmark = pytest.mark.every_redis


class Running:
    """An engine on a thread, at 2 ms per step."""

    def __init__(self, url: str, namespace: str) -> None:
        config = EngineConfig(redis_url=url, namespace=namespace, engine_id="e", max_seqs=8, lease_ms=paced_ms(500))
        self.bus = BusThread(config)
        self.engine = Engine(config, ScriptedExecutor(INFO, 2048, step_seconds=0.002), self.bus, self.bus)
        self.bus.start()
        self._thread = threading.Thread(target=self.engine.run)
        self._thread.start()

    @property
    def generated(self) -> int:
        return self.engine.core.report.totals.generated_tokens

    def stop(self) -> None:
        self.engine.draining = True
        self._thread.join(patience(LIMIT_S))
        self.bus.stop()


def request(name: str, tokens: int) -> Generate:
    deadline_ms = int(time.time() * 1000) + LONG_MS
    return Generate(name, "g1", [5], tokens, Sampling(seed=3, ignore_eos=True), deadline_ms, n=2)


async def until_generated(running: Running, tokens: int) -> None:
    async with asyncio.timeout(patience(LIMIT_S)):
        while running.generated < tokens:  # noqa: ASYNC110  (another thread's event)
            await asyncio.sleep(0.005)


def script(count: int) -> list[list[int]]:
    return [[scripted_token(3, index, at, 100) for at in range(count)] for index in range(2)]


async def test_generation_goes_on_while_redis_restarts(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway = await own_bus.gateway()
    running = Running(own_server.url, own_bus.namespace)
    try:
        await gateway.submit(request("a", 1000))
        reading = asyncio.create_task(answer(gateway, "a", n=2))
        await until_generated(running, 50)
        for _ in range(2):
            own_server.stop()
            before = running.generated
            await until_generated(running, min(before + 300, 2000))  # by the second time it may be done
            with pytest.raises(BusDown):
                await gateway.submit(request("refused", 5))
            own_server.start()
            await gateway.fleet()  # may find the lease lapsed: it was away for longer
        assert await reading == script(1000)
        attached = await gateway.attach("a")
        assert attached is not None
        assert [said.token_ids for said in attached.choices] == script(1000)
        assert [said.finish for said in attached.choices] == [Finish("length")] * 2
        assert await gateway.attach("refused") is None
        assert await gateway.operations.quarantined() == []
    finally:
        own_server.start()
        running.stop()


async def test_full_memory_refuses_what_is_new_and_corrupts_nothing(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, other = await own_bus.gateway("g1"), await own_bus.gateway("g2")
    running = Running(own_server.url, own_bus.namespace)
    try:
        await gateway.submit(request("a", 1500))  # 3 s at least: it outlives the others' patience
        reading = asyncio.create_task(answer(gateway, "a", n=2))
        await until_generated(running, 50)
        with redis.Redis.from_url(own_server.url) as client:
            client.config_set("maxmemory", "1mb")
            refused = [gateway.submit(request("b", 5), record=b"x" * 100_000), other.attach("a")]
            for answered in await asyncio.gather(*refused, return_exceptions=True):
                assert isinstance(answered, BusDown)
                assert "OOM" in str(answered)
            assert await reading == script(1500)
            client.config_set("maxmemory", "0")
        attached = await other.attach("a")
        assert attached is not None
        assert [said.token_ids for said in attached.choices] == script(1500)
    finally:
        running.stop()


async def test_an_engine_that_is_told_to_go_while_redis_is_away_goes(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    """Unsent tokens were never seen: the engine that takes over emits them again."""
    gateway = await own_bus.gateway()
    running = Running(own_server.url, own_bus.namespace)
    await gateway.submit(request("a", 400))
    await until_generated(running, 50)
    own_server.stop()
    stopping = asyncio.create_task(asyncio.to_thread(running.stop))
    try:
        async with asyncio.timeout(patience(LIMIT_S)):
            await asyncio.shield(stopping)
    finally:
        own_server.start()
        await stopping
    reading = asyncio.create_task(answer(gateway, "a", n=2))
    following = Running(own_server.url, own_bus.namespace)
    try:
        assert await reading == script(400)
    finally:
        following.stop()
