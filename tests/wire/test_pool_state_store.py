"""The pool-state store in a real Redis: nothing is written while no gateway watches, and everything expires."""

from __future__ import annotations

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import PoolState, SequenceBlocks
from quire.engine.wire.pool_state_store import STATE_MS, WATCH_MS
from tests.pace import patience
from tests.wire.sides import Bus, take

pytestmark = pytest.mark.every_redis


def state(engine: str, cells: bytes = b"\x00\x01\x02\x03") -> PoolState:
    runs = b"\x02\x00\x00\x00\x02\x00\x00\x00"
    return PoolState(engine, len(cells), 1, cells, [SequenceBlocks("r1.0", 0, runs)], 1, 8, 2)


async def test_an_engine_learns_of_a_watcher_in_its_next_exchange(bus: Bus) -> None:
    gateway, engine, seen = await bus.gateway(), await bus.engine(), list[bool]()
    with redis.Redis.from_url(bus.url) as store:
        for wanted in (False, True, False):
            if wanted:
                await gateway.pool_states.watch()
                assert 0 < store.pttl(f"{{{bus.namespace}}}:watch") <= WATCH_MS
            else:
                store.delete(f"{{{bus.namespace}}}:watch")
            await take(engine)
            seen.append(engine.watched)
    assert seen == [False, True, False]


async def test_the_first_watcher_rings_the_bell_and_a_renewal_does_not(bus: Bus) -> None:
    """Idle engines sync once per second; a wake-up makes them sync at once."""
    gateway = await bus.gateway()
    bell = f"{{{bus.namespace}}}:bell"
    with redis.Redis.from_url(bus.url) as store, store.pubsub(ignore_subscribe_messages=False) as listener:
        listener.subscribe(bell)
        assert listener.get_message(timeout=patience(30))["type"] == "subscribe"
        for _ in range(3):
            await gateway.pool_states.watch()
        store.publish(bell, "the end")
        heard = [listener.get_message(timeout=patience(30))["data"] for _ in range(2)]
    assert heard == [b"", b"the end"]


async def test_states_are_read_as_they_were_written_and_expire(bus: Bus) -> None:
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    assert await gateway.pool_states.read(["e1", "e2"]) == {}
    assert await gateway.pool_states.read([]) == {}
    await one.pool_states.write(state("e1", b"\x00" * 9))
    await one.pool_states.write(state("e1"))
    await other.pool_states.write(state("e2"))
    assert await gateway.pool_states.read(["e1", "e2", "e3"]) == {"e1": state("e1"), "e2": state("e2")}
    with redis.Redis.from_url(bus.url) as store:
        assert 0 < store.pttl(f"{{{bus.namespace}}}:pool_state:e1") <= STATE_MS
        for rubbish in (b"rubbish", b"", b"\x78\x01\x01\x01\x00\xfe\xff\x05\x00\x0b\x00\x06"):
            store.set(f"{{{bus.namespace}}}:pool_state:e1", rubbish)
            assert await gateway.pool_states.read(["e1", "e2"]) == {"e2": state("e2")}


async def test_a_redis_that_is_away_is_named(own_bus: Bus, own_server: EmbeddedRedis) -> None:
    gateway = await own_bus.gateway()
    own_server.stop()
    for call in (gateway.pool_states.watch(), gateway.pool_states.read(["e1"])):
        with pytest.raises(BusDown):
            await call
