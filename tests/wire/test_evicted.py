"""Redis evicts keys, as with `allkeys-random` under memory pressure: no script fails, and new requests are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import Delta, Finish, TokenBatch
from quire.engine.wire.prefixes import PrefixReport
from quire.engine.wire.quotas import Quota
from tests.pace import patience
from tests.wire.sides import LATE, LONG_MS, Bus, generate, load, within

OPERATIONS = 400
QUOTA = Quota(requests_per_minute=10_000, tokens_per_minute=10**7, max_requests=50)


class Life:
    """Random operations of a gateway and two engines, between which keys vanish."""

    def __init__(self, bus: Bus, client: redis.Redis, seed: int) -> None:
        self._bus, self._client, self._dice = bus, client, random.Random(seed)
        self._held: dict[str, dict[str, int]] = {"e1": {}, "e2": {}}
        self._names: list[str] = []

    async def open(self) -> None:
        self.gateway = await self._bus.gateway()
        self.engines = {name: await self._bus.engine(name) for name in self._held}

    def evict(self, policy: str) -> None:
        keys = sorted(self._client.scan_iter(f"{{{self._bus.namespace}}}:*", count=1000))
        if policy == "volatile":
            keys = [key for key in keys if self._client.ttl(key) >= 0]
        if keys:
            self._client.delete(self._dice.choice(keys))

    async def operate(self) -> None:
        operation = self._dice.choice(
            [self.submit, self.sync, self.sync, self.sync, self.fleet, self.cancel, self.settle]
        )
        await operation()

    async def submit(self) -> None:
        name, dice = f"r{len(self._names)}", self._dice
        self._names.append(name)
        deadline_ms = self.gateway.clock.redis_ms() + LONG_MS
        await self.gateway.quotas.take("t", QUOTA, name, deadline_ms, [(10, 5)])
        tenant = dice.choice(["", "t"])
        request = generate(f"{name}.0", dice.randint(1, 300), tenant=tenant, prefixes=dice.randbytes(8))
        await self.gateway.submit(request, bounds=dice.choice([LATE, within(10**9)]))

    async def sync(self) -> None:
        engine, dice = dice_choice(self._dice, self.engines), self._dice
        held, deltas, finished = self._held[engine], list[Delta](), list[str]()
        for name, count in held.items():
            ends = dice.random() < 0.3
            deltas.append(Delta(name, count, [count], Finish("length") if ends else None))
            finished += [name] * ends
            held[name] = count + 1
        self._held[engine] = {name: count for name, count in held.items() if name not in finished}
        report = PrefixReport([dice.randbytes(8)], [], 20.0, 5000.0, 10)
        batches = [("g1", TokenBatch(engine, deltas))] if deltas else []
        free = dice.choice([0, 200, 10**6])
        reply = await self.engines[engine].sync(batches, finished, load(engine), free, 4, report)
        for name in (*reply.reassigned, *(abort.id for abort in reply.aborts)):
            self._held[engine].pop(name, None)
        for request in reply.generates:
            resumed = reply.resumed.get(request.id)
            self._held[engine][request.id] = len(resumed[0].token_ids) if resumed else 0

    async def fleet(self) -> None:
        await self.gateway.fleet()

    async def cancel(self) -> None:
        if self._names:
            await self.gateway.cancel(f"{self._dice.choice(self._names)}.0")

    async def settle(self) -> None:
        if self._names:
            await self.gateway.settle([(f"{self._dice.choice(self._names)}.0", "t", [1])])


def dice_choice(dice: random.Random, names: Any) -> str:
    return str(dice.choice(sorted(names)))


async def within_patience(work: Awaitable[Any]) -> None:
    async with asyncio.timeout(patience(100)):
        await work


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["volatile", "allkeys"])
async def test_no_script_fails(
    own_bus: Bus, own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture, policy: str, seed: int
) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        life = Life(own_bus, client, seed)
        await life.open()
        for _ in range(OPERATIONS):
            life.evict(policy)
            await within_patience(life.operate())
            assert "user_script" not in caplog.text
        fresh = generate("fresh.0")
        await life.gateway.submit(fresh, bounds=within(10**9))
        async with asyncio.timeout(patience(100)):
            while "fresh.0" not in life._held["e1"] and "fresh.0" not in life._held["e2"]:
                await life.fleet()
                await life.sync()
                assert client.exists(f"{{{own_bus.namespace}}}:req:fresh.0")
