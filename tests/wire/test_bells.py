"""A request wakes a bounded number of engines, and no engine sleeps while a request waits that it could claim."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import RINGS
from quire.engine.wire.records import SyncReply
from tests.wire.sides import LONG_MS, Bus, generate, ids, load, take
from tests.wire.test_locality import SLOW, ask, prompt
from tests.wire.test_sync_commands import commands

SLOTS = 2  # requests that an engine runs at once
ROOMS = {"e0": 30, "e1": 30, "e2": 60, "e3": 100}  # prompt tokens


class Bells:
    """Hears which engines are woken.  Its subscriptions are the only ones that Redis counts as listeners."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}:bell:"
        self._channel: Any = client.pubsub()  # type: ignore[no-untyped-call]

    def listen(self, *engines: str) -> None:
        self._channel.subscribe(*(self._prefix + name for name in engines))

    def leave(self, engine: str) -> None:
        self._channel.unsubscribe(self._prefix + engine)

    def close(self) -> None:
        self._channel.close()

    def rung(self) -> list[str]:
        """Return the engines that were woken since the last call, in order."""
        self._channel.ping("end")
        found: list[str] = []
        while True:
            message = self._channel.get_message(timeout=None)
            if message["type"] == "pong":
                return found
            if message["type"] == "message":
                found.append(message["channel"].decode().removeprefix(self._prefix))


async def deafen(engine: EngineSide) -> None:
    """Its wake-ups reach `Bells` only."""
    await engine._wakeups.aclose()  # type: ignore[no-untyped-call]


async def test_a_request_wakes_a_full_engine_that_would_preempt_for_its_tenant(bus: Bus) -> None:
    """Not for a tenant over its share, nor for more tokens than the tenant could start there."""
    gateway = await bus.gateway()
    with redis.Redis.from_url(bus.url) as client:
        bells = Bells(client, bus.namespace)
        full = msgspec.structs.replace(
            load("full"), over_share=["loud"], preemptible_tokens=100, preemptible_tokens_of={"near": 5}
        )
        engine, small = await bus.engine("full"), await bus.engine("small")
        for one in (engine, small):
            await deafen(one)
        bells.listen("full", "small")

        async def woken_by(tenant: str) -> list[str]:
            await engine.sync([], [], full, 0, 0)
            await small.sync([], [], load("small"), 5, 1)  # free capacity for no request of this test
            bells.rung()
            await gateway.submit(generate(name := uuid.uuid4().hex, tenant=tenant))
            woken = bells.rung()
            await gateway.cancel(name)
            return woken

        assert await woken_by("loud") == await woken_by("near") == []
        assert await woken_by("quiet") == ["full"]
        await engine.sync([], [], full, 5, 1)  # a little free capacity, and the same sequences to preempt
        bells.rung()
        await gateway.submit(generate("another", tenant="quiet"))
        assert bells.rung() == ["full"]
        bells.close()


@pytest.mark.every_redis
async def test_a_request_wakes_few_of_many_engines(bus: Bus) -> None:
    """Those with the most free capacity; and it runs no more commands than with few engines."""
    gateway = await bus.gateway()
    counts = {}
    names: list[str] = []
    with redis.Redis.from_url(bus.url) as client:
        bells = Bells(client, bus.namespace)
        for number in (RINGS, 24):
            for at in range(len(names), number):
                names.append(f"e{at:02}")
                engine = await bus.engine(names[-1])
                await engine.sync([], [], load(names[-1]), 1_000 + at, 1)
                await deafen(engine)
                bells.listen(names[-1])
            bells.rung()
            _, counts[number] = await commands(client, gateway.submit(generate(f"r{number}")))
            assert sorted(bells.rung()) == names[-RINGS:]
        assert counts[24] <= counts[RINGS]
        # Those two are on their way: the next request wakes others.
        await gateway.submit(generate("another"))
        assert sorted(bells.rung()) == names[-2 * RINGS : -RINGS]
        bells.close()


@pytest.mark.every_redis
async def test_an_engine_that_leaves_a_request_to_a_better_one_wakes_it(bus: Bus) -> None:
    gateway, one, better = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    with redis.Redis.from_url(bus.url) as client:
        bells = Bells(client, bus.namespace)
        await better.sync([], [], load("e2"), 1_000_000, 10, SLOW)
        await gateway.submit(ask("first", prompt(1, 1100)))
        assert ids(await better.sync([], [], load("e2"), 1_000_000, 10, SLOW)) == ["first"]
        await better.sync([], ["first"], load("e2"), 5_000, 10, SLOW)
        await one.sync([], [], load("e1"), 1_000_000, 10, SLOW)
        await deafen(better)
        bells.listen("e1")
        await gateway.submit(ask("second", prompt(1, 1100)))
        assert bells.rung() == ["e1"]
        bells.listen("e2")
        reply = await one.sync([], [], load("e1"), 1_000_000, 10, SLOW)
        assert (ids(reply), bells.rung()) == ([], ["e2"])
        bells.close()
        assert ids(await better.sync([], [], load("e2"), 5_000, 10, SLOW)) == ["second"]


async def test_what_a_dead_engine_held_wakes_others(bus: Bus) -> None:
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await gateway.submit(generate("a"))
    assert ids(await take(one)) == ["a"]
    await take(other, "e2")
    ringing = asyncio.create_task(other.wait_for_wakeup())
    bus.lapse("e1")
    await gateway.fleet()
    await ringing
    assert ids(await take(other, "e2")) == ["a"]


class Idle(RuleBasedStateMachine):
    """Engines sync when they are woken or a step ends, and never by themselves."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.namespace = uuid.uuid4().hex
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.bells = Bells(self.client, self.namespace)
        self.gateway = GatewaySide(self.server.url, "g1", namespace=self.namespace)
        self.run(self.gateway.open())
        self.engines: dict[str, EngineSide] = {}
        self.dead: list[EngineSide] = []
        self.held: dict[str, dict[str, int]] = {name: {} for name in ROOMS}
        self.waiting: dict[str, int] = {}  # request -> prompt tokens
        self.number = 0
        self.come("e0")

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def room(self, name: str) -> tuple[int, int]:
        held = self.held[name]
        return ROOMS[name] - sum(held.values()), SLOTS - len(held)

    def sync(self, name: str, finished: tuple[str, ...] = ()) -> None:
        for one in finished:
            del self.held[name][one]
        reply: SyncReply = self.run(self.engines[name].sync([], list(finished), load(name), *self.room(name)))
        for request in reply.generates:
            self.held[name][request.id] = self.waiting.pop(request.id)

    def settle(self) -> None:
        """Let woken engines sync until none is woken."""
        for _ in range(200):
            rung = self.bells.rung()
            if not rung:
                return
            for name in rung:
                if name in self.engines:
                    self.sync(name)
        raise AssertionError("engines wake each other for ever")

    def come(self, name: str) -> None:
        side = EngineSide(self.server.url, name, namespace=self.namespace, lease_ms=LONG_MS)
        self.run(side.open())
        self.run(deafen(side))
        self.engines[name] = side
        self.bells.listen(name)
        self.sync(name)

    @rule(name=st.sampled_from(sorted(ROOMS)))
    def start_engine(self, name: str) -> None:
        if name not in self.engines:
            self.come(name)
        self.check()

    @rule(tokens=st.integers(1, 110))
    def submit(self, tokens: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.waiting[name] = tokens
        self.run(self.gateway.submit(generate(name, tokens)))
        self.check()

    @rule(count=st.integers(2, 6), tokens=st.integers(1, 50))
    def submit_many(self, count: int, tokens: int) -> None:
        """Before any engine that was woken syncs."""
        for _ in range(count):
            self.number += 1
            self.waiting[f"r{self.number}"] = tokens
            self.run(self.gateway.submit(generate(f"r{self.number}", tokens)))
        self.check()

    @rule(data=st.data())
    @precondition(lambda self: any(self.held[name] for name in self.engines))
    def step(self, data: st.DataObject) -> None:
        busy = sorted(name for name in self.engines if self.held[name])
        name = data.draw(st.sampled_from(busy))
        ended = data.draw(st.sets(st.sampled_from(sorted(self.held[name]))))
        self.sync(name, tuple(sorted(ended)))
        self.check()

    @rule(data=st.data())
    @precondition(lambda self: len(self.engines) > 1)
    def kill(self, data: st.DataObject) -> None:
        """Its process is gone; Redis learns of it by the lease."""
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.dead.append(self.engines.pop(name))
        self.bells.leave(name)
        self.bells.rung()
        # Until the lapse requests may come, which wake no dead engine alone.
        self.submit(1)
        self.client.delete(f"{{{self.namespace}}}:lease:{name}", f"{{{self.namespace}}}:reached")
        self.run(self.gateway.fleet())
        self.waiting |= self.held[name]
        self.held[name] = {}
        self.check()

    def check(self) -> None:
        """No idle engine could claim the request that is next.  One that is busy syncs after its step."""
        self.settle()
        prefix = f"{{{self.namespace}}}:"
        for name in self.quarantined():
            self.waiting.pop(name, None)
        found: Any = self.client.zrange(f"{prefix}queue:on_time:", 0, -1)
        queue = [one.decode() for one in found]
        suspects = self.client.zcard(f"{prefix}suspects")
        if queue and not suspects:
            for name in self.engines:
                tokens, slots = self.room(name)
                assert self.held[name] or slots == 0 or tokens < self.waiting[queue[0]], (name, queue[0])

    def quarantined(self) -> list[str]:
        return [one.request.id for one in self.run(self.gateway.operations.quarantined())]

    def teardown(self) -> None:
        sides: list[Any] = [self.gateway, *self.engines.values(), *self.dead]
        for side in sides:
            self.run(side.close())
        self.bells.close()
        self.client.close()
        self.runner.close()


@pytest.mark.every_redis
@pytest.mark.usefixtures("patient")
def test_no_engine_is_idle_while_a_request_waits_for_it(redis_server: EmbeddedRedis) -> None:
    Idle.server = redis_server
    run_state_machine_as_test(
        Idle,
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
