"""Which requests become suspects, which engine runs them, and what the other engines do meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import AWAY_MS
from tests.pace import patience
from tests.wire.sides import LONG_MS, Bus, batch, generate, ids, load, take


async def fail_twice(bus: Bus) -> None:
    """An engine fails twice at the first token of all it claims."""
    for _ in range(2):
        engine = await bus.engine("failing")
        await take(engine, "failing")
        await engine.close(died=True)


@pytest.mark.parametrize("died", [True, False])
async def test_an_engine_that_closes_as_failed_counts_an_attempt(bus: Bus, died: bool) -> None:
    gateway = await bus.gateway()
    await gateway.submit(generate("poison"))
    for _ in range(3):
        engine = await bus.engine()
        if not ids(await take(engine)):
            break
        await engine.close(died=died)
        assert (await gateway.fleet()).engines == []  # at once, not at the lapse
    kept = await gateway.operations.quarantined()
    assert [(one.request.id, one.attempts) for one in kept] == ([("poison", 2)] if died else [])


async def test_what_a_failed_engine_said_last_counts_as_progress(bus: Bus) -> None:
    """It is in the engine's unflushed log tail when the engine closes."""
    gateway = await bus.gateway()
    await gateway.submit(generate("long"))
    for at in range(4):
        engine = await bus.engine()
        assert ids(await take(engine)) == ["long"]
        await engine.sync([("g1", batch("long", at))], [], load("e1"), 0, 0)
        await engine.close(died=True)
    assert await gateway.operations.quarantined() == []


async def test_a_failed_engine_is_remembered(bus: Bus) -> None:
    """Closing twice, or after a lost reply, is harmless; its successor continues under its name."""
    gateway = await bus.gateway()
    await gateway.submit(generate("a"))
    engine = await bus.engine()
    await take(engine)
    engine._registered = True
    await engine.close(died=True)
    again = await bus.engine()
    assert ids(await take(again)) == ["a"]
    engine._registered = True
    await engine.close(died=True)  # late: its session is over
    assert [one.engine for one in (await gateway.fleet()).engines] == ["e1"]


async def room(engine: EngineSide, name: str, tokens: int, total_blocks: int = 100) -> list[str]:
    """Return its claims with free capacity for so many tokens; an empty engine fits 16 times `total_blocks`."""
    said = msgspec.structs.replace(load(name), total_blocks=total_blocks)
    return ids(await engine.sync([], [], said, tokens, 1000))


async def test_a_suspect_that_fits_nowhere_stops_one_engine_and_not_the_fleet(bus: Bus) -> None:
    gateway = await bus.gateway()
    await gateway.submit(generate("long", 500))
    await gateway.submit(generate("mate", 10))
    await fail_twice(bus)
    engines = {name: await bus.engine(name) for name in ("e1", "e2", "e3")}
    for i in range(12):
        await gateway.submit(generate(f"r{i}"))
    claimed = {
        name: [await room(engine, name, 30 * (round + 1)) for round in range(3)] for name, engine in engines.items()
    }
    idle = [name for name, each in claimed.items() if not any(each)]
    assert len(idle) == 1, claimed
    # The engine that freed its blocks gets it, and runs it alone.
    holder = engines[idle[0]]
    assert await room(holder, idle[0], 600) == ["long"]
    assert await room(holder, idle[0], 600) == []
    others = [name for name in engines if name != idle[0]]
    assert await room(engines[others[0]], others[0], 30) == ["mate"]
    assert await room(engines[others[1]], others[1], 30) != [] or (await gateway.fleet()).queued == 0


async def test_whoever_has_the_room_takes_a_suspect_at_once(bus: Bus) -> None:
    gateway = await bus.gateway()
    await gateway.submit(generate("long", 500))
    await gateway.submit(generate("mate", 10))
    await fail_twice(bus)
    first, second = await bus.engine("e1"), await bus.engine("e2")
    assert await room(first, "e1", 100) == []
    assert await room(second, "e2", 700) == ["long"]
    assert await room(first, "e1", 100) == ["mate"]


async def test_an_engine_that_could_never_hold_a_suspect_leaves_it_to_others(bus: Bus) -> None:
    gateway = await bus.gateway()
    await gateway.submit(generate("long", 500))
    await gateway.submit(generate("mate", 10))
    await fail_twice(bus)
    await gateway.submit(generate("other"))
    small, large = await bus.engine("e1"), await bus.engine("e2")
    assert await room(small, "e1", 320, total_blocks=20) == ["other"]
    assert await room(large, "e2", 100) == []
    assert await room(large, "e2", 1600) == ["long"]


async def test_when_the_engine_that_makes_room_is_gone_another_one_does(bus: Bus) -> None:
    gateway = await bus.gateway()
    await gateway.submit(generate("long", 500))
    await gateway.submit(generate("mate", 10))
    await fail_twice(bus)
    first, second = await bus.engine("e1"), await bus.engine("e2")
    assert await room(first, "e1", 100) == []
    await gateway.submit(generate("a"))
    assert await room(second, "e2", 100) == ["a"]
    await gateway.submit(generate("b"))
    bus.lapse("e1")
    with redis.Redis.from_url(bus.url) as client:
        client.delete(f"{{{bus.namespace}}}:making_room")  # what one engine holds for as long as a lease
    assert await room(second, "e2", 100) == []
    assert await room(second, "e2", 600) == ["long"]


async def lapse(bus: Bus, gateway: GatewaySide, server: EmbeddedRedis, *, away: bool) -> None:
    """An engine claims what is queued and loses its lease: it is killed, or Redis restarts under it."""
    engine = await bus.engine(lease_ms=300 if away else LONG_MS)
    assert ids(await take(engine)) == ["innocent"]
    if away:
        server.stop()
        await asyncio.sleep((AWAY_MS + 200) / 1000)
        server.start()
        await gateway.fleet()
    else:
        bus.lapse("e1")
    async with asyncio.timeout(patience(100)):
        while (await gateway.fleet()).engines:  # noqa: ASYNC110  (Redis' clock)
            await asyncio.sleep(0.05)


@pytest.mark.every_redis
@pytest.mark.parametrize("away", [True, False])
async def test_a_lease_that_lapses_because_redis_was_away_counts_as_no_death(
    own_server: EmbeddedRedis, own_bus: Bus, away: bool
) -> None:
    """Two short outages with no sync between them put an innocent request in quarantine."""
    gateway = await own_bus.gateway()
    await gateway.submit(generate("innocent"))
    await gateway.fleet()
    for _ in range(2):
        await lapse(own_bus, gateway, own_server, away=away)
    assert [one.request.id for one in await gateway.operations.quarantined()] == ([] if away else ["innocent"])
