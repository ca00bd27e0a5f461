"""The store of hot prefixes in a real Redis: counted, decayed, bounded, and deadly to one start at most."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.common.embedded_redis import EmbeddedRedis
from engine.hot_prefixes import NOTED
from engine.wire import hot_prefix_store
from engine.wire.engine_side import EngineSide
from engine.wire.hot_prefix_store import FADED, HALF_LIFE_MS, MANIFEST_MS, MOST, MOST_BYTES, NEWS_BYTES, Reuse
from engine.wire.link import BusDown
from engine.wire.messages import HotPrefix
from engine.wire.scripts import Script
from engine.wire.token_log import TOKEN_BYTES
from tests.wire.sides import Bus, generate, take

NOW_MS = 1_790_000_000_000


def reuse(name: str, hits: int = 1, length: int = 8, salt: str = "") -> Reuse:
    return Reuse(name.encode(), range(length + 3), length, salt, hits)


def packed(one: Reuse) -> bytes:
    return msgspec.msgpack.encode(one.prefix())


async def counts(engine: EngineSide, now_ms: int, fingerprint: str = "f") -> list[tuple[float, HotPrefix]]:
    """Decayed hits and prefix of every entry, as the manifest orders them; it stays readable."""
    found = await engine.manifest.hottest(fingerprint)
    await engine.manifest.warmed()
    return [
        (2 ** (heat - now_ms / HALF_LIFE_MS), msgspec.msgpack.decode(prefix, type=HotPrefix)) for heat, prefix in found
    ]


async def test_hits_are_counted_by_prefix_and_halve_with_time(bus: Bus) -> None:
    one, other = await bus.engine("e1"), await bus.engine("e2")
    system, document = reuse("system", 6), reuse("document", 1, 12, "acme")
    await one.manifest.reused("f", [system, document], NOW_MS)
    await other.manifest.reused("f", [reuse("system", 2)], NOW_MS)
    later = NOW_MS + HALF_LIFE_MS
    [(first, hottest), (second, next_one)] = await counts(one, later)
    assert first == pytest.approx(4, rel=1e-6)
    assert second == pytest.approx(0.5, rel=1e-6)
    assert (hottest, next_one) == (system.prefix(), document.prefix())
    assert next_one == HotPrefix(b"".join(bytes([i, 0, 0, 0]) for i in range(12)), "acme")
    await one.manifest.reused("f", [reuse("document", 8, 12, "acme")], later)
    assert [hot.cache_salt for _, hot in await counts(one, later)] == ["acme", ""]
    assert await counts(one, later, "other weights") == []


async def test_tokens_travel_once_and_the_new_ones_in_portions(bus: Bus) -> None:
    engine = await bus.engine()
    long = NEWS_BYTES // TOKEN_BYTES // 2
    news = [reuse("a", 1, long), reuse("b", 3, long), reuse("c", 2, long)]
    await engine.manifest.reused("f", news, NOW_MS)
    assert [hits for hits, _ in await counts(engine, NOW_MS)] == pytest.approx([3, 2], rel=1e-6)
    sent: list[int] = []
    run = engine.manifest._run

    async def counted(script: Script, *args: bytes | str | int) -> Any:
        sent.append(sum(len(arg) for arg in args if isinstance(arg, bytes)))
        return await run(script, *args)

    engine.manifest._run = counted
    await engine.manifest.reused("f", news[1:], NOW_MS)
    assert sent == [2]  # the digests
    await engine.manifest.reused("f", news[:1], NOW_MS)
    assert [hits for hits, _ in await counts(engine, NOW_MS)] == pytest.approx([6, 4, 1], rel=1e-6)


async def test_a_salt_counts_among_the_bytes_of_what_is_new(bus: Bus) -> None:
    engine = await bus.engine()
    await engine.manifest.reused("f", [reuse("a", 5, 8, "s" * NEWS_BYTES), reuse("b", 1)], NOW_MS)
    assert [hot.cache_salt for _, hot in await counts(engine, NOW_MS)] == [""]


async def test_a_manifest_that_nobody_reports_to_is_forgotten(bus: Bus) -> None:
    engine = await bus.engine()
    await engine.manifest.reused("f", [reuse("a")], NOW_MS)
    with redis.Redis.from_url(bus.url) as store:
        kept = [key for key in store.scan_iter(f"{{{bus.namespace}}}:*") if b"hot:" in key or b"heat:" in key]
        assert len(kept) == 2
        assert all(0 < store.pttl(key) <= MANIFEST_MS for key in kept)


async def test_who_died_of_the_manifest_does_not_read_it_at_the_next_start(bus: Bus) -> None:
    engine = await bus.engine("e1")
    await engine.manifest.reused("f", [reuse("a")], NOW_MS)
    assert len(await engine.manifest.hottest("f")) == 1
    # It dies here.  Others are not affected.
    again, other = await bus.engine("e1"), await bus.engine("e2")
    assert await again.manifest.hottest("f") == []
    assert len(await other.manifest.hottest("f")) == 1
    await other.manifest.warmed()
    assert len(await other.manifest.hottest("f")) == 1
    third = await bus.engine("e1")
    assert len(await third.manifest.hottest("f")) == 1  # the second start went well, without it


async def test_an_engine_is_wanted_while_requests_wait_that_the_others_have_no_room_for(bus: Bus) -> None:
    gateway, starting, serving = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    assert not await starting.manifest.wanted()
    await gateway.submit(generate("r1"))
    assert await starting.manifest.wanted()
    await take(serving, "e2", 0, 8)  # it is full
    assert await starting.manifest.wanted()
    await take(serving, "e2", 100)
    assert not await starting.manifest.wanted()
    await gateway.submit(generate("r2"))
    assert not await starting.manifest.wanted()  # the other one has room
    await serving.close()
    assert await starting.manifest.wanted()


async def test_the_bookkeeping_of_bytes_mends_itself(bus: Bus) -> None:
    engine = await bus.engine()
    with redis.Redis.from_url(bus.url) as store:
        store.hset(f"{{{bus.namespace}}}:hot:f", "bytes", 10 * MOST_BYTES)
        await engine.manifest.reused("f", [reuse("a")], NOW_MS)
        assert len(await counts(engine, NOW_MS)) == 1
        assert int(store.hget(f"{{{bus.namespace}}}:hot:f", "bytes") or 0) == len(packed(reuse("a")))


@pytest.mark.every_redis
async def test_a_full_redis_keeps_what_it_has_and_takes_no_more(own_bus: Bus) -> None:
    engine = await own_bus.engine()
    await engine.manifest.reused("f", [reuse("a", 2)], NOW_MS)
    with redis.Redis.from_url(own_bus.url) as store:
        store.config_set("maxmemory", "1kb")
        for refused in ([reuse("a", 2), reuse("b")], [reuse("b")]):
            with pytest.raises(BusDown, match="OOM"):
                await engine.manifest.reused("f", refused, NOW_MS)
        assert [hits for hits, _ in await counts(engine, NOW_MS)] == pytest.approx([2], rel=1e-6)
        store.config_set("maxmemory", "0")
    await engine.manifest.reused("f", [reuse("b")], NOW_MS)
    assert len(await counts(engine, NOW_MS)) == 2


async def test_what_a_report_costs_redis(own_bus: Bus) -> None:
    """The largest there is, in a full manifest; by its own clock, with room for a busy machine."""
    engine = await own_bus.engine()
    names = [f"{i:032}" for i in range(NOTED)]
    for start in range(0, NOTED, MOST // 2):
        await engine.manifest.reused("f", [reuse(name, 1, 64) for name in names[start : start + MOST // 2]], NOW_MS)
    with redis.Redis.from_url(own_bus.url) as store:

        def spent_us() -> int:
            return int(store.info("commandstats")["cmdstat_evalsha"]["usec"])  # type: ignore[index]

        before = spent_us()
        await engine.manifest.reused("f", [reuse(name, 1, 64) for name in names], NOW_MS + 1)
        cost = (spent_us() - before) / NOTED
    print(f"Redis, for an entry of a report: {cost:.1f} us")
    assert cost < 500


class Table(RuleBasedStateMachine):
    """Any number of reports from two engines at any times, against counts that are summed up anew each time."""

    server: EmbeddedRedis
    most: int
    most_bytes: int

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.namespace = f"manifest-{uuid.uuid4().hex}"
        self.engines = [EngineSide(self.server.url, f"e{i}", namespace=self.namespace) for i in range(2)]
        for engine in self.engines:
            self.runner.run(engine.open())
        self.now_ms = NOW_MS
        self.hits: dict[str, list[tuple[int, int]]] = {}  # name -> (unix ms, hits) since it came in
        self.lengths: dict[str, int] = {}

    def teardown(self) -> None:
        for engine in self.engines:
            self.runner.run(engine.close())
        self.client.close()
        self.runner.close()

    def count(self, name: str) -> float:
        return sum(hits * 2 ** ((at - self.now_ms) / HALF_LIFE_MS) for at, hits in self.hits[name])

    def size(self) -> int:
        return sum(len(packed(reuse(name, 1, self.lengths[name]))) for name in self.hits)

    @rule(
        engine=st.integers(0, 1),
        found=st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(1, 50), st.integers(1, 40))),
        ms=st.one_of(st.integers(0, 10_000), st.integers(0, 3 * HALF_LIFE_MS)),
    )
    def report(self, engine: int, found: dict[str, tuple[int, int]], ms: int) -> None:
        self.now_ms += ms + 1  # so that no two are equally hot
        for name, (_, length) in found.items():
            self.lengths.setdefault(name, length)
        reuses = [reuse(name, hits, self.lengths[name]) for name, (hits, _) in found.items()]
        self.runner.run(self.engines[engine].manifest.reused("f", reuses, self.now_ms))
        # First those that are known, then the new ones, each time down to what may be kept.
        known = {name for name in found if name in self.hits}
        for names in (known, found.keys() - known):
            if not names and names is not known:
                continue
            for name in names:
                self.hits.setdefault(name, []).append((self.now_ms, found[name][0]))
            for name in [name for name in self.hits if self.count(name) < 2**-FADED * (1 - 1e-9)]:
                del self.hits[name]
            while len(self.hits) > self.most or self.size() > self.most_bytes:
                del self.hits[min(self.hits, key=lambda name: (self.count(name), name))]

    @invariant()
    def same(self) -> None:
        found = self.runner.run(counts(self.engines[0], self.now_ms))
        assert len(found) <= self.most
        by_length = sorted((hot.tokens, hits) for hits, hot in found)
        wanted = sorted((reuse(name, 1, self.lengths[name]).prefix().tokens, self.count(name)) for name in self.hits)
        assert [tokens for tokens, _ in by_length] == [tokens for tokens, _ in wanted]
        heats = [hits for hits, _ in found]
        assert heats == sorted(heats, reverse=True)
        assert math.fsum(hits for _, hits in by_length) == pytest.approx(math.fsum(hits for _, hits in wanted), 1e-5)
        size = self.client.hget(f"{{{self.namespace}}}:hot:f", "bytes")
        assert int(size or 0) == self.size()


@pytest.fixture(params=[(4, MOST_BYTES), (MOST, 150)], ids=["entries", "bytes"])
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Small ones, so that they matter."""
    most, most_bytes = request.param
    body = hot_prefix_store._REUSED.replace(f"> {MOST} ", f"> {most} ").replace(f"> {MOST_BYTES} ", f"> {most_bytes} ")
    monkeypatch.setattr(hot_prefix_store, "REUSED", Script(body))
    return most, most_bytes


def test_the_table_is_counted_decayed_and_bounded(redis_server: EmbeddedRedis, bounds: tuple[int, int]) -> None:
    Table.server = redis_server
    Table.most, Table.most_bytes = bounds
    run_state_machine_as_test(
        Table,
        settings=settings(
            max_examples=25, stateful_step_count=15, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
