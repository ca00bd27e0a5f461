"""Stored responses: their holder reads them, the oldest are replaced, leases of dead gateways pass on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import RESPONSE_BYTES
from quire.engine.wire.response_store import ResponseStore

HOUR_MS, MIB = 3_600_000, 2**20


@pytest.fixture
async def side(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[GatewaySide]:
    side = GatewaySide(redis_server.url, "g0", namespace=namespace)
    await side.open()
    yield side
    await side.close()


async def put(
    store: ResponseStore,
    name: str,
    body: bytes = b"{}",
    *,
    holder: str = "a",
    given: bytes | None = b"[]",
    previous: str = "",
    ended: bool = True,
    most: int = MIB,
    lease_ms: int = 0,
    ttl_ms: int = HOUR_MS,
) -> int:
    return await store.put(
        holder,
        name,
        body,
        ended=ended,
        ttl_ms=ttl_ms,
        max_bytes=most,
        given=given,
        previous=previous,
        lease_ms=lease_ms,
    )


@pytest.mark.every_redis
async def test_only_the_holder_reads_and_drops(side: GatewaySide) -> None:
    store = side.responses
    await put(store, "r1", b'{"a": 1}', given=b"[1]")
    found = await store.get("a", "r1")
    assert found is not None
    assert (found.id, found.input, found.body, found.ended) == ("r1", b"[1]", b'{"a": 1}', True)
    assert await store.get("b", "r1") is None
    assert not await store.drop("b", "r1")
    assert await store.drop("a", "r1")
    assert not await store.drop("a", "r1")
    assert await store.get("a", "r1") is None


@pytest.mark.every_redis
async def test_a_chain_is_read_to_its_beginning(side: GatewaySide) -> None:
    store = side.responses
    await put(store, "r1", b"x" * 100)
    await put(store, "r2", previous="r1")
    await put(store, "r3", previous="r2")
    chain = await store.chain("a", "r3", max_bytes=MIB, ttl_ms=HOUR_MS)
    assert ([one.id for one in chain.found], chain.missing) == (["r3", "r2", "r1"], "")
    chain = await store.chain("a", "r3", max_bytes=0, ttl_ms=HOUR_MS)
    assert ([one.id for one in chain.found], chain.missing) == (["r3"], "r2")
    await store.drop("a", "r1")
    chain = await store.chain("a", "r3", max_bytes=MIB, ttl_ms=HOUR_MS)
    assert ([one.id for one in chain.found], chain.missing) == (["r3", "r2"], "r1")
    assert (await store.chain("b", "r3", max_bytes=MIB, ttl_ms=HOUR_MS)).missing == "r3"


@pytest.mark.every_redis
async def test_the_oldest_make_room_and_no_other_holder_does(side: GatewaySide) -> None:
    store, most = side.responses, 3 * (RESPONSE_BYTES + 104)
    await put(store, "other", holder="b")
    for at in range(3):
        assert await put(store, f"r{at}", b"x" * 100, most=most) == 0
        await asyncio.sleep(0.005)  # the order of their expiry
    await store.chain("a", "r0", max_bytes=MIB, ttl_ms=HOUR_MS)  # used again: it is the newest
    assert await put(store, "r3", b"x" * 100, most=most) == 1
    assert [await store.get("a", f"r{at}") is not None for at in range(4)] == [True, False, True, True]
    assert await put(store, "big", b"x" * most, most=most) == -1
    assert await put(store, "r4", b"x" * (most - RESPONSE_BYTES - 2), most=most) == 3
    assert await store.get("b", "other") is not None


@pytest.mark.every_redis
async def test_the_first_end_counts(side: GatewaySide) -> None:
    store = side.responses
    assert await put(store, "r1", b"1", given=None) == -2
    await put(store, "r1", b"queued", ended=False, given=b"[5]", previous="r0")
    assert await put(store, "r1", b"running", ended=False, given=None) == 0
    assert await put(store, "r1", b"cancelled", given=None) == 0
    assert await put(store, "r1", b"completed", given=None) == -2
    found = await store.get("a", "r1")
    assert found is not None
    assert (found.input, found.body, found.ended) == (b"[5]", b"cancelled", True)


@pytest.mark.every_redis
async def test_a_lapsed_lease_passes_on_once(side: GatewaySide) -> None:
    store = side.responses
    await put(store, "r1", ended=False, lease_ms=60_000)
    await put(store, "r2", ended=False, lease_ms=60_000)
    assert await store.renew(60_000, ["r1", "r2"]) == ([], [])
    assert await store.renew(0, ["r1"], 0) == ([], [])  # its gateway shuts down
    assert await store.renew(60_000, ["r2"]) == ([], [("r1", "a")])
    assert await store.renew(60_000, []) == ([], [])
    await store.drop("a", "r2")
    await put(store, "r1", given=None)
    assert await store.renew(60_000, ["r1", "r2"]) == (["r1", "r2"], [])


@pytest.mark.every_redis
async def test_expired_responses_count_no_more(side: GatewaySide) -> None:
    store, most = side.responses, RESPONSE_BYTES + 4
    await put(store, "r1", ttl_ms=1, most=most)
    await asyncio.sleep(0.01)
    assert await put(store, "r2", most=most) == 0
    assert await store.get("a", "r1") is None
