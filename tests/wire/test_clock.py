"""Each process estimates Redis' clock from replies, whatever its own clock says."""

from __future__ import annotations

import logging
import random

import msgspec
import pytest

from quire.engine.commands import on_own_clock
from quire.engine.wire.clock import ALARM_S, SAMPLES, SLACK_MS, RedisClock, steady_ms
from tests.wire.sides import LONG_MS, Bus, generate, load, take


class World:
    """A process's clocks and those of its Redis, ms."""

    def __init__(self, ahead_ms: float = 0.0) -> None:
        self.steady, self.redis, self.wall = 5e11, 5e11 - ahead_ms, 5e11
        self.clock = RedisClock(lambda: self.steady, lambda: self.wall / 1000)

    def pass_ms(self, ms: float) -> None:
        self.steady, self.redis, self.wall = self.steady + ms, self.redis + ms, self.wall + ms

    def sync(self, there_ms: float, back_ms: float) -> None:
        sent = self.clock.ticks()
        self.pass_ms(there_ms)
        said = int(self.redis)
        self.pass_ms(back_ms)
        self.clock.sample(sent, said)

    @property
    def error_ms(self) -> float:
        return self.clock.redis_ms() - self.redis


@pytest.mark.parametrize("ahead_ms", [-60_000.0, 0.0, 60_000.0])
def test_the_shortest_round_trip_counts(ahead_ms: float) -> None:
    world, dice = World(ahead_ms), random.Random(1)
    assert world.clock.skew_s == 0.0
    for number in range(200):
        slow = 400.0 if number % 5 else 1.0  # the one way, as where Redis or this process is busy
        world.sync(dice.random() * slow, dice.random())
        world.pass_ms(50)
        if number >= SAMPLES:
            assert abs(world.error_ms) <= 2
    assert abs(world.clock.skew_s - ahead_ms / 1000) < 0.01
    assert abs(world.clock.local_ms(int(world.redis) + 1000) - world.steady - 1000) <= 2


def test_another_time_at_redis_is_taken_over_at_once() -> None:
    """Its clock was set, or another server answers."""
    world = World()
    for _ in range(SAMPLES):
        world.sync(0.5, 0.5)
    world.redis += 90_000
    world.sync(200.0, 1.0)
    assert abs(world.error_ms) <= 201
    world.sync(0.5, 0.5)
    assert abs(world.error_ms) <= 2
    world.redis -= SLACK_MS / 2  # drift is no jump
    world.sync(5.0, 5.0)
    assert len(world.clock._samples) > 1


def test_setting_this_machines_clock_moves_nothing_but_the_skew() -> None:
    world = World()
    world.sync(0.5, 0.5)
    world.wall -= 3_600_000
    world.sync(0.5, 0.5)
    assert abs(world.error_ms) <= 2
    assert abs(world.clock.skew_s + 3600) < 0.01


def test_a_wrong_clock_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ahead_ms=-1500.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            world.sync(0.5, 0.5)
        assert [record.getMessage().count("1.5 s behind Redis' clock") for record in caplog.records] == [1]
        world.wall += 1500.0
        world.sync(0.5, 0.5)
        world.wall += 1000 * ALARM_S + 500
        world.sync(0.5, 0.5)
        assert len(caplog.records) == 2


@pytest.mark.parametrize("gateway_s", [-60, 60])
@pytest.mark.parametrize("engine_s", [-60, 60])
async def test_deadlines_keep_their_seconds_between_clocks(bus: Bus, gateway_s: int, engine_s: int) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for side, ahead_s in ((gateway, gateway_s), (engine, engine_s)):
        side.clock._steady = lambda ahead_s=ahead_s: steady_ms() + ahead_s * 1000.0  # type: ignore[misc]
    await gateway.fleet()
    request = generate("a")
    now_ms = gateway.clock.redis_ms()
    await gateway.submit(msgspec.structs.replace(request, deadline_ms=now_ms + LONG_MS, queued_ms=now_ms))
    [claimed] = (await take(engine)).generates
    own = on_own_clock(claimed, engine.clock)
    assert 0 < own.deadline_ms - engine.clock.ticks() <= LONG_MS + 500
    assert own.deadline_ms - own.queued_ms == LONG_MS
    assert on_own_clock(request, engine.clock).queued_ms == 0
    await engine.sync([], ["a"], load("e1"), 0, 0)
    await gateway.submit(msgspec.structs.replace(generate("b"), deadline_ms=now_ms - 1))
    assert (await take(engine)).generates == []
