"""The hot-prefix store in a real Redis: one bounded key with a TTL, read once."""

from __future__ import annotations

import pytest
import redis

from quire.engine.wire.hot_prefix_store import MAX_BYTES, MAX_PREFIXES, TTL_MS, bounded
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import HotPrefix
from quire.engine.wire.token_log import TOKEN_BYTES
from tests.wire.sides import Bus, generate, take


def prefix(name: int, length: int = 8, salt: str = "") -> HotPrefix:
    return HotPrefix(bytes([name % 256]) * length * TOKEN_BYTES, salt)


async def test_the_next_engine_reads_the_last_write_once(bus: Bus) -> None:
    one, other, third = await bus.engine("e1"), await bus.engine("e2"), await bus.engine("e3")
    assert await third.hot_prefixes.take("f") == []
    await one.hot_prefixes.write("f", [prefix(1)])
    await other.hot_prefixes.write("f", [prefix(2), prefix(3, salt="acme")])
    assert await third.hot_prefixes.take("other weights") == []
    assert await third.hot_prefixes.take("f") == [prefix(2), prefix(3, salt="acme")]
    # An engine that dies of what it read does not read it again; the others write anew.
    assert await third.hot_prefixes.take("f") == []
    await other.hot_prefixes.write("f", [prefix(2)])
    assert await third.hot_prefixes.take("f") == [prefix(2)]


async def test_it_is_one_key_that_goes_away_in_minutes(bus: Bus) -> None:
    engine = await bus.engine()
    with redis.Redis.from_url(bus.url) as store:
        before = set(store.scan_iter(f"{{{bus.namespace}}}:*"))
        await engine.hot_prefixes.write("f", [prefix(i) for i in range(20)])
        (key,) = set(store.scan_iter(f"{{{bus.namespace}}}:*")) - before
        assert key.decode() == f"{{{bus.namespace}}}:hot_prefixes:f"
        assert 0 < store.pttl(key) <= TTL_MS <= 15 * 60_000


async def test_its_size_is_bounded(bus: Bus) -> None:
    engine = await bus.engine()
    await engine.hot_prefixes.write("f", [prefix(i) for i in range(2 * MAX_PREFIXES)])
    assert await engine.hot_prefixes.take("f") == [prefix(i) for i in range(MAX_PREFIXES)]
    length = 32_768
    most = MAX_BYTES // TOKEN_BYTES // length
    await engine.hot_prefixes.write("f", [prefix(i, length) for i in range(2 * most)])
    assert len(await engine.hot_prefixes.take("f")) == most
    assert bounded([prefix(1, salt="s" * MAX_BYTES)]) == []  # a salt counts, too


async def test_rubbish_is_refused_by_name(bus: Bus) -> None:
    engine = await bus.engine()
    with redis.Redis.from_url(bus.url) as store:
        for value in (b"rubbish", b"\x05", b"\x91\x05"):
            store.set(f"{{{bus.namespace}}}:hot_prefixes:f", value)
            with pytest.raises(ValueError, match="unreadable hot prefixes"):
                await engine.hot_prefixes.take("f")
            assert await engine.hot_prefixes.take("f") == []


@pytest.mark.every_redis
async def test_a_full_redis_refuses_a_write_and_serves_reads(own_bus: Bus) -> None:
    engine = await own_bus.engine()
    await engine.hot_prefixes.write("f", [prefix(1)])
    with redis.Redis.from_url(own_bus.url) as store:
        store.config_set("maxmemory", "1kb")
        with pytest.raises(BusDown, match="OOM"):
            await engine.hot_prefixes.write("f", [prefix(2)])
        store.config_set("maxmemory", "0")
    assert await engine.hot_prefixes.take("f") == [prefix(1)]


async def test_requests_wait_while_the_serving_engines_have_no_room(bus: Bus) -> None:
    gateway, starting, serving = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    assert not await starting.hot_prefixes.requests_wait()
    await gateway.submit(generate("r1"))
    assert await starting.hot_prefixes.requests_wait()
    await take(serving, "e2", 0, 8)  # it is full
    assert await starting.hot_prefixes.requests_wait()
    await take(serving, "e2", 100)
    assert not await starting.hot_prefixes.requests_wait()
    await gateway.submit(generate("r2"))
    assert not await starting.hot_prefixes.requests_wait()  # the other one has free capacity
    await serving.close()
    assert await starting.hot_prefixes.requests_wait()
