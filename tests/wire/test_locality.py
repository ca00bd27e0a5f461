"""Prefix locality in a real Redis: who claims a request whose prefix an engine holds, and how long others leave it."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import time
from typing import Any

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.layout import MAX_LOADS, PACE_TOKENS, PREFIX_COUNT, RECOMPUTE, STALE_MS, TRIES, WINDOW
from quire.engine.wire.messages import Generate, Sampling
from quire.engine.wire.prefixes import LENGTHS, PrefixReport, adapter_digest, prefix_digests, split
from quire.engine.wire.records import QueueBounds, SyncReply
from quire.engine.wire.scripts import Script
from tests.wire.sides import LATE, LONG_MS, Bus, generate, ids, load

FAST = PrefixReport(token_us=50.0, step_us=10_000.0)  # 50 ms for 1,000 tokens
SLOW = PrefixReport(token_us=1e6, step_us=10_000.0)  # so slow that no delay ends within a test


def prompt(prefix: int, length: int, own: int = 0) -> list[int]:
    """Return `length` tokens that begin as every prompt of this prefix does, the last `own` of them unique."""
    shared = random.Random(prefix).choices(range(1000), k=length - own)
    return shared + random.choices(range(1000, 2000), k=own)


def ask(name: str, token_ids: list[int], salt: str = "", tenant: str = "", priority: int = 0) -> Generate:
    deadline_ms = int(time.time() * 1000) + LONG_MS
    digests = prefix_digests(token_ids, salt)
    return Generate(
        name, "g1", token_ids, 5, Sampling(), deadline_ms, salt, tenant=tenant, priority=priority, prefixes=digests
    )


def holding(token_ids: list[int], costs: PrefixReport = SLOW, backlog: int = 0) -> PrefixReport:
    """Report that the cache has these tokens."""
    return PrefixReport(split(prefix_digests(token_ids, "")), [], costs.token_us, costs.step_us, backlog)


async def sync(
    engine: EngineSide, name: str, report: PrefixReport | None = SLOW, tokens: int = 1_000_000, requests: int = 100
) -> SyncReply:
    return await engine.sync([], [], load(name), tokens, requests, report)


async def two(
    bus: Bus, first: PrefixReport | None, second: PrefixReport | None = SLOW
) -> tuple[EngineSide, EngineSide]:
    """Open engines e1 and e2 that report these."""
    engines = await bus.engine("e1"), await bus.engine("e2")
    for engine, name, report in zip(engines, ("e1", "e2"), (first, second), strict=True):
        await sync(engine, name, report)
    return engines


# --------------------------------------------------------------------------------------------------------- digests


def test_lua_and_python_agree_on_the_lengths(redis_server: EmbeddedRedis) -> None:
    body = f"local found = {{}} for i = 1, {PREFIX_COUNT} do found[i] = prefix_tokens(i) end return found"
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.eval(Script(body).source, 1, "x:") == list(LENGTHS)
    assert (LENGTHS[0], LENGTHS[15], LENGTHS[-1], len(LENGTHS)) == (64, 1024, 65_536, PREFIX_COUNT)
    # Beyond the dense part no gap is more than an eighth of the length.
    assert all(b - a <= max(64, a / 8) for a, b in itertools.pairwise(LENGTHS))


def test_digests_depend_on_the_tokens_so_far_and_on_the_salt() -> None:
    tokens = prompt(1, 1000)
    digests = split(prefix_digests(tokens, "a"))
    assert len(digests) == 15
    assert split(prefix_digests(tokens[:640], "a")) == digests[:10]
    assert split(prefix_digests([*tokens[:639], 7777, *tokens[640:]], "a"))[9:] != digests[9:]
    assert not set(digests) & set(split(prefix_digests(tokens, "b")))
    assert prefix_digests(tokens[:63], "a") == b""
    assert len(split(prefix_digests([1] * 100_000, ""))) == PREFIX_COUNT


# --------------------------------------------------------------------------------------------------------- choosing


async def test_an_engine_takes_the_request_whose_prefix_it_holds_longest(bus: Bus) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024) + prompt(2, 64)), None)
    await gateway.submit(ask("cold", prompt(9, 900)))
    await gateway.submit(ask("short", prompt(1, 600, own=300)))
    await gateway.submit(ask("long", prompt(1, 1020, own=100)))
    got = await sync(engine, "e1", requests=1)
    assert ids(got) == ["long"]
    assert (got.claim("long").held_tokens, got.claim("long").reason) == (896, "held")
    assert ids(await sync(engine, "e1", requests=1)) == ["short"]
    got = await sync(engine, "e1", requests=1)
    assert (ids(got), got.claim("cold").reason) == (["cold"], "waited")


async def test_an_engine_leaves_a_request_to_another_one_that_holds_its_prefix_and_has_room(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    await gateway.submit(ask("a", prompt(1, 1100, own=76)))
    got = await sync(other, "e2")
    assert ids(got) == []
    assert got.retry_ms > 1_000_000  # 1,024 tokens of a second each
    assert ids(await sync(holder, "e1")) == ["a"]


async def test_it_is_left_for_no_longer_than_computing_it_again_takes(bus: Bus) -> None:
    """1 ms per token: 1,100 tokens are 1.1 s.  The holder never asks."""
    costs = PrefixReport(token_us=1000.0, step_us=10_000.0)
    gateway = await bus.gateway()
    _, other = await two(bus, holding(prompt(1, 1024), costs), costs)
    await gateway.submit(ask("a", prompt(1, 1100, own=76)))
    got = await sync(other, "e2", costs)
    assert ids(got) == []
    assert 1 <= got.retry_ms <= 1100
    await asyncio.sleep(got.retry_ms / 1000)
    got = await sync(other, "e2", costs)
    assert (ids(got), got.claim("a").reason) == (["a"], "waited")


async def test_it_is_never_left_beyond_its_target(bus: Bus, redis_server: EmbeddedRedis) -> None:
    gateway = await bus.gateway()
    _, other = await two(bus, holding(prompt(1, 1024)))
    await gateway.submit(ask("a", prompt(1, 1100)), bounds=QueueBounds(target_ms=60_000))
    got = await sync(other, "e2")
    assert (ids(got), 1 <= got.retry_ms <= 45_000) == ([], True)
    with redis.Redis.from_url(redis_server.url) as client:
        passed(bus, client, "a", over=True)
    assert ids(await sync(other, "e2")) == ["a"]


async def test_an_engine_takes_what_follows_a_request_that_it_leaves(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    await gateway.submit(ask("a", prompt(1, 1100)))
    await gateway.submit(ask("b", prompt(2, 1100)))
    assert ids(await sync(other, "e2", requests=1)) == ["b"]  # the same tenant's
    await gateway.submit(ask("c", prompt(3, 1100), tenant="second"))
    assert ids(await sync(other, "e2", requests=1)) == ["c"]  # a tenant's whose turn comes later
    assert ids(await sync(holder, "e1")) == ["a"]


async def test_only_an_engine_that_can_take_it_is_waited_for(bus: Bus, redis_server: EmbeddedRedis) -> None:
    """Not an engine that is full, has too little capacity, is silent, has no lease, drains, or publishes nothing."""
    gateway = await bus.gateway()
    held = holding(prompt(1, 1024))
    holder, other = await two(bus, held)
    with redis.Redis.from_url(redis_server.url) as client:
        prefix = f"{{{bus.namespace}}}:"

        async def left() -> bool:
            await gateway.submit(ask("a", prompt(1, 1100)))
            got = await sync(other, "e2")
            if ids(got):
                await other.sync([], ["a"], load("e2"), 0, 0, PrefixReport(removed=held.added))
            else:
                await gateway.cancel("a")
            client.delete(f"{prefix}req:a")  # its tombstone: the name is used again
            return not ids(got)

        assert await left()
        await sync(holder, "e1", tokens=0)  # full, or draining
        assert not await left()
        await sync(holder, "e1", tokens=1000)
        assert not await left()
        await sync(holder, "e1", requests=0)
        assert not await left()
        await sync(holder, "e1")
        assert await left()
        spare = client.hget(f"{prefix}spare", "e1")
        assert isinstance(spare, bytes)
        room, heard, *rest = struct.unpack("<6d", spare)
        client.hset(f"{prefix}spare", "e1", struct.pack("<6d", room, heard - STALE_MS - 1, *rest))
        assert not await left()
        await sync(holder, "e1")
        assert await left()
        client.delete(f"{prefix}lease:e1")
        assert not await left()
        await sync(holder, "e1")
        await sync(holder, "e1", None)  # an engine of an earlier release
        assert not await left()


async def test_engines_that_do_not_publish_and_requests_without_digests_keep_the_queues_order(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    await gateway.submit(ask("a", prompt(1, 1100)))
    await gateway.submit(ask("b", prompt(2, 1100)))
    assert ids(await sync(other, "e2", None)) == ["a"]
    assert ids(await sync(other, "e2", None)) == ["b"]
    await gateway.submit(generate("plain", 1100))
    assert ids(await sync(other, "e2")) == ["plain"]
    assert ids(await sync(holder, "e1")) == []


async def test_one_engine_alone_keeps_the_queues_order(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine("e1")
    await sync(engine, "e1", holding(prompt(1, 1024)))
    await gateway.submit(ask("cold", prompt(9, 900)))
    await gateway.submit(ask("held", prompt(1, 1024)))
    assert ids(await sync(engine, "e1", requests=1)) == ["cold"]


# ----------------------------------------------------------------------------------------------------------- bounds


def passed(bus: Bus, client: redis.Redis, name: str, *, over: bool = False) -> tuple[int, int]:
    """Return from when a request goes first, and when it was first passed over, unix ms; with `over`, as if the time
    between had gone by."""
    key = f"{{{bus.namespace}}}:passed"
    found = client.hget(key, name)
    assert isinstance(found, bytes)
    until, since = map(int, found.split())
    if over:
        client.hset(key, name, f"{since} {2 * since - until}")
    return until, since


async def test_being_passed_over_at_most_doubles_a_wait(bus: Bus, redis_server: EmbeddedRedis) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024), FAST), None)
    begun = time.monotonic()
    await gateway.submit(ask("cold", prompt(9, 300)), bounds=LATE)  # 15 ms to compute
    await asyncio.sleep(0.1)
    for at in range(3):
        await gateway.submit(ask(f"hot {at}", prompt(1, 1000)), bounds=LATE)
    assert ids(await sync(engine, "e1", FAST, requests=1)) == ["hot 0"]
    waited_ms = 1000 * (time.monotonic() - begun)
    with redis.Redis.from_url(redis_server.url) as client:
        until, since = passed(bus, client, "cold", over=True)
        assert 98 <= until - since <= waited_ms + 2
    assert ids(await sync(engine, "e1", FAST, requests=1)) == ["cold"]
    assert ids(await sync(engine, "e1", FAST, requests=1)) == ["hot 1"]


async def test_a_passed_over_request_does_not_lose_its_time_on_the_on_time_lane(
    bus: Bus, redis_server: EmbeddedRedis
) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024)), None)
    await gateway.submit(ask("cold", prompt(9, 900)), bounds=QueueBounds(target_ms=100_000))
    await gateway.submit(ask("hot 1", prompt(1, 1000)))
    await gateway.submit(ask("hot 2", prompt(1, 1000)))
    assert ids(await sync(engine, "e1", requests=1)) == ["hot 1"]
    with redis.Redis.from_url(redis_server.url) as client:
        until, since = passed(bus, client, "cold", over=True)
        assert until - since <= 75_001  # 900 s to compute it, but 100 s until its target
    assert ids(await sync(engine, "e1", requests=1)) == ["cold"]


async def test_a_head_that_does_not_fit_ends_the_claim(bus: Bus) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024)), None)
    await gateway.submit(ask("large", prompt(9, 3000)))
    await gateway.submit(ask("held", prompt(1, 1024)))
    assert ids(await sync(engine, "e1", tokens=2000)) == []
    assert ids(await sync(engine, "e1", tokens=3000, requests=1)) == ["held"]


async def test_tenants_and_priority_classes_keep_their_order(bus: Bus) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024)), None)
    await gateway.submit(ask("a cold", prompt(8, 500), tenant="a"))
    await gateway.submit(ask("b cold", prompt(9, 900), tenant="b"))
    await gateway.submit(ask("a low held", prompt(1, 1024), tenant="a", priority=1))
    await gateway.submit(ask("b held", prompt(1, 1024), tenant="b"))
    order = [ids(await sync(engine, "e1", requests=1))[0] for _ in range(4)]
    # By counters: a 0, b 0 -> a 500 -> b 1,024 -> a.  Only within b's class does the held one go first.
    assert order == ["a cold", "b held", "a low held", "b cold"]


async def test_the_window_is_bounded(bus: Bus) -> None:
    gateway = await bus.gateway()
    engine, _ = await two(bus, holding(prompt(1, 1024)), None)
    for at in range(WINDOW):
        await gateway.submit(ask(f"cold {at}", prompt(100 + at, 128)), bounds=LATE)
    await gateway.submit(ask("held", prompt(1, 1024)), bounds=LATE)
    assert ids(await sync(engine, "e1", requests=1)) == ["cold 0"]
    assert ids(await sync(engine, "e1", requests=1)) == ["held"]


async def test_an_exchange_that_leaves_many_tenants_requests_goes_on_in_the_queues_order(bus: Bus) -> None:
    """It tries TRIES requests in vain.  Beyond them tenants keep their turns, and an engine with capacity gets work."""
    gateway = await bus.gateway()
    _, other = await two(bus, SLOW)  # e1 is idle
    busy = PrefixReport(token_us=1e6, step_us=10_000.0, backlog=1_000_000)
    names = [f"r{at:03}" for at in range(TRIES + 10)]
    for name in names:
        await gateway.submit(ask(name, prompt(1, 100), tenant=f"tenant of {name}"))
    got = await sync(other, "e2", busy, requests=1)
    assert (ids(got), got.retry_ms > 0) == ([names[TRIES]], True)
    assert ids(await sync(other, "e2", busy, requests=5)) == names[TRIES + 1 : TRIES + 6]
    # A tenant whose window allows more attempts is examined to its end.
    for at in range(3):
        await gateway.submit(ask(f"first {at}", prompt(1, 100), tenant=f"tenant of {names[0]}"))
    assert ids(await sync(other, "e2", busy, requests=1)) == [names[TRIES - 3]]


async def test_one_exchange_may_pass_over_thousands(bus: Bus, redis_server: EmbeddedRedis) -> None:
    """More than Lua takes as the arguments of one command."""
    gateway, tenants = await bus.gateway(), 135
    engine = await bus.engine("e1")
    await sync(engine, "e1", holding(prompt(1, 1024)))
    await sync(await bus.engine("e2"), "e2", None)
    for tenant in range(tenants):
        work = [ask(f"{tenant} {at}", prompt(9, 64), tenant=f"t{tenant}") for at in range(WINDOW - 1)]
        await asyncio.gather(*(gateway.submit(request, bounds=LATE) for request in work))
        await gateway.submit(ask(f"{tenant} held", prompt(1, 64), tenant=f"t{tenant}"), bounds=LATE)
    got = await sync(engine, "e1", requests=tenants)
    assert set(ids(got)) == {f"{tenant} held" for tenant in range(tenants)}
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.hlen(f"{{{bus.namespace}}}:passed") == tenants * (WINDOW - 1)


# ----------------------------------------------------------------------------------------------------------- bursts


async def test_equal_prefixes_that_arrive_together_meet_before_one_is_computed(bus: Bus) -> None:
    gateway = await bus.gateway()
    first, second = await two(bus, SLOW)
    await gateway.submit(ask("a", prompt(1, 1100, own=76)))
    assert ids(await sync(first, "e1")) == ["a"]
    await sync(first, "e1")  # its backlog is what the engine reports: computed by now
    await gateway.submit(ask("b", prompt(1, 1100, own=76)))
    assert ids(await sync(second, "e2")) == []
    got = await sync(first, "e1")
    assert (ids(got), got.claim("b").held_tokens) == (["b"], 1024)


async def test_what_redis_and_the_engine_believe_to_be_published_never_differs(
    bus: Bus, redis_server: EmbeddedRedis
) -> None:
    """However it was claimed: alone, as a suspect, by prefix."""
    gateway, engine = await bus.gateway(), await bus.engine("e1")
    with redis.Redis.from_url(redis_server.url) as client:

        def agrees() -> bool:
            return bool(client.smembers(f"{{{bus.namespace}}}:prefixes:e1") == engine._prefixes._held)

        await gateway.submit(ask("alone", prompt(1, 500)))
        assert ids(await sync(engine, "e1")) == ["alone"]
        assert agrees()
        assert len(engine._prefixes._held) == 7
        await sync(await bus.engine("e2"), "e2")
        await gateway.submit(ask("b", prompt(2, 500)))
        await sync(engine, "e1")
        assert agrees()
        await gateway.submit(ask("suspect", prompt(3, 500)))
        key = f"{{{bus.namespace}}}:"
        client.zadd(f"{key}suspects", {"suspect": 1})
        for name in ("queue:on_time:", "ages:on_time", "due", "turns:on_time"):
            client.delete(key + name)
        client.hdel(f"{key}waiting", "suspect")
        assert ids(await sync(engine, "e1")) == ["suspect"]
        assert agrees()
        assert len(engine._prefixes._held) == 21


async def test_a_burst_of_one_prefix_spreads_once_waiting_costs_more_than_computing_it_again(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    for at in range(40):
        await gateway.submit(ask(f"r{at}", prompt(1, 1124, own=100)))
    # A fair share is 20 of 40.  After 19, 1,900 tokens wait: about twice what the other one would compute again.
    got = await sync(holder, "e1")
    assert (len(ids(got)), got.retry_ms > 0) == (19, True)
    backlogs, counts = {"e1": 1900, "e2": 0}, {"e1": 19, "e2": 0}
    for _ in range(40):  # nothing is computed meanwhile
        for engine, name in ((other, "e2"), (holder, "e1")):
            got = await sync(engine, name, PrefixReport(token_us=1e6, step_us=10_000.0, backlog=backlogs[name]))
            backlogs[name] += sum(1124 - got.claim(one).held_tokens for one in ids(got))
            counts[name] += len(ids(got))
    assert sum(counts.values()) == 40
    # It computes the prefix once, and both have about as much to do.  (Requests that were passed over long enough go to
    # the engine that asks.)
    assert counts["e2"] >= 10
    assert max(backlogs.values()) <= 3000 < 40 * 100


async def test_the_holder_leaves_a_request_that_an_idle_engine_would_begin_sooner(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024), backlog=5000))
    await gateway.submit(ask("a", prompt(1, 1100)))
    assert ids(await sync(holder, "e1", holding([], backlog=5000))) == []
    assert ids(await sync(other, "e2")) == ["a"]


async def test_an_engine_with_slower_steps_is_not_preferred_for_a_short_prefix(bus: Bus) -> None:
    gateway = await bus.gateway()
    costs = PrefixReport(token_us=50.0, step_us=10_000.0 + RECOMPUTE * 1024 * 50 / PACE_TOKENS + 100)
    _, other = await two(bus, holding(prompt(1, 1024), costs), FAST)
    await gateway.submit(ask("a", prompt(1, 1100)))
    assert ids(await sync(other, "e2", FAST)) == ["a"]


# ------------------------------------------------------------------------------------------------- leases, restarts


async def test_evicted_prefixes_are_forgotten(bus: Bus) -> None:
    gateway = await bus.gateway()
    held = holding(prompt(1, 1024))
    holder, other = await two(bus, held)
    await sync(holder, "e1", PrefixReport(removed=held.added, token_us=1e6, step_us=10_000.0))
    await gateway.submit(ask("a", prompt(1, 1100)))
    assert ids(await sync(other, "e2")) == ["a"]


async def test_a_dead_engines_prefixes_go_with_its_lease_and_come_back_when_it_rejoins(
    bus: Bus, redis_server: EmbeddedRedis
) -> None:
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    with redis.Redis.from_url(redis_server.url) as client:
        key = f"{{{bus.namespace}}}:prefixes:e1"
        assert 0 < client.pttl(key) <= LONG_MS
        client.delete(f"{{{bus.namespace}}}:lease:e1")
        await gateway.fleet()
        assert not client.exists(key)
        await gateway.submit(ask("a", prompt(1, 1100)))
        assert ids(await sync(other, "e2")) == ["a"]
        await sync(holder, "e1")
        assert client.scard(key) == 16
    await gateway.submit(ask("b", prompt(1, 1000) + prompt(5, 2000)))
    assert ids(await sync(holder, "e1")) == ["b"]


@pytest.mark.parametrize("lost", ["", "reply", "reply, and then the digests"])
@pytest.mark.parametrize("gains", [False, True])
async def test_digests_that_expire_before_a_gateway_notices_the_lapse_are_published_afresh(
    bus: Bus, redis_server: EmbeddedRedis, lost: str, gains: bool
) -> None:
    """Redis stood still for longer than the lease, or all gateways were away.  The engine has sent what it holds."""
    gateway = await bus.gateway()
    holder, other = await two(bus, holding(prompt(1, 1024)))
    more = PrefixReport(split(prefix_digests(prompt(2, 640), "")) if gains else [], [], SLOW.token_us, SLOW.step_us)
    with redis.Redis.from_url(redis_server.url) as client:

        def lapse() -> None:
            client.delete(f"{{{bus.namespace}}}:prefixes:e1", f"{{{bus.namespace}}}:lease:e1")

        key = f"{{{bus.namespace}}}:prefixes:e1"
        await gateway.submit(ask("before", prompt(3, 128)))
        if lost != "reply, and then the digests":
            lapse()
        run, repeat = holder._link.run_script, bool(lost)

        async def send(*words: Any, **more: Any) -> Any:
            nonlocal repeat
            reply = await run(*words, **more)
            if repeat:
                repeat = False
                if lost == "reply, and then the digests":
                    lapse()
                return await run(*words, **more)  # the first reply was lost
            return reply

        holder._link.run_script = send  # type: ignore[method-assign]
        got = await sync(holder, "e1", more)
        assert (ids(got), got.reassigned) == (["before"], [])
        assert client.pttl(key) != -1
        await sync(holder, "e1")
        assert client.smembers(key) == holder._prefixes._held
        assert client.scard(key) == 16 + 10 * gains + 2
        assert 0 < client.pttl(key) <= LONG_MS
        await gateway.fleet()
        await gateway.submit(ask("a", prompt(1, 1100)))
        assert ids(await sync(other, "e2")) == []
        assert ids(await sync(holder, "e1")) == ["a"]
        assert holder._epoch == "0"


async def test_a_second_engine_of_the_same_name_begins_without_prefixes(bus: Bus) -> None:
    gateway = await bus.gateway()
    await two(bus, holding(prompt(1, 1024)))
    other = await bus.engine("e3")
    await sync(other, "e3")
    again = await bus.engine("e1")
    await sync(again, "e1")
    await gateway.submit(ask("a", prompt(1, 1100)))
    assert ids(await sync(other, "e3")) == ["a"]


async def test_a_repeated_exchange_claims_the_same(bus: Bus) -> None:
    gateway = await bus.gateway()
    holder, _ = await two(bus, holding(prompt(1, 1024)), None)
    await gateway.submit(ask("cold", prompt(9, 900)))
    await gateway.submit(ask("held", prompt(1, 1024)))
    got = await sync(holder, "e1", requests=1)
    holder._seq -= 1  # as if the reply had been lost
    again = await sync(holder, "e1", requests=1)
    assert (ids(again), again.claims) == (ids(got), got.claims) == (["held"], got.claims)


async def test_what_an_earlier_release_leaves_behind_is_swept(bus: Bus, redis_server: EmbeddedRedis) -> None:
    gateway = await bus.gateway()
    prefix = f"{{{bus.namespace}}}:"
    await gateway.submit(ask("a", prompt(1, 1100)))
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(f"{prefix}prefixes", "gone", b"12345678")
        client.hset(f"{prefix}passed", mapping={"gone": "1 1", "gone 2": "1 1"})
        await gateway.fleet()
        assert client.hkeys(f"{prefix}prefixes") == [b"a"]
        assert not client.exists(f"{prefix}passed")
        await gateway.cancel("a")
        assert not client.exists(f"{prefix}prefixes")


# ------------------------------------------------------------------------------------------------------ LoRA adapters


def adapted(name: str, adapter: str, tokens: int = 20) -> Generate:
    return msgspec.structs.replace(ask(name, prompt(9, tokens), adapter), adapter=adapter, cache_salt="")


def loading(*held: str, load_us: float = 1e9, loads: int = 0) -> PrefixReport:
    """Report that these adapters are in memory, and that a load takes so long."""
    return PrefixReport([adapter_digest(one) for one in held], [], SLOW.token_us, SLOW.step_us, 0, load_us, loads)


@pytest.mark.parametrize("tokens", [20, 200])
async def test_an_adapters_request_is_left_to_the_engine_that_holds_it(bus: Bus, tokens: int) -> None:
    """Prompts too short for a prefix digest, and long ones."""
    gateway = await bus.gateway("g1")
    holder, other = await two(bus, loading("a@1"), loading("b@1"))
    await gateway.submit(adapted("a", "a@1", tokens), bounds=LATE)
    await gateway.submit(adapted("b", "b@1", tokens), bounds=LATE)
    assert ids(await sync(other, "e2", loading())) == ["b"]
    assert ids(await sync(other, "e2", loading())) == []
    assert ids(await sync(holder, "e1", loading())) == ["a"]


async def test_a_request_that_no_engine_holds_the_adapter_of_is_loaded_by_the_one_that_asks(bus: Bus) -> None:
    """From the claim on it counts as a holder: the next request of the adapter goes there."""
    gateway = await bus.gateway("g1")
    one, other = await two(bus, loading(), loading())
    await gateway.submit(adapted("a1", "a@1"), bounds=LATE)
    assert ids(await sync(one, "e1", loading())) == ["a1"]
    await gateway.submit(adapted("a2", "a@1"), bounds=LATE)
    assert ids(await sync(other, "e2", loading())) == []
    assert ids(await sync(one, "e1", loading())) == ["a2"]
    evicted = PrefixReport([], [adapter_digest("a@1")], SLOW.token_us, SLOW.step_us, 0, 1e9)
    await sync(one, "e1", evicted)
    await gateway.submit(adapted("a3", "a@1"), bounds=LATE)
    assert ids(await sync(other, "e2", loading())) == ["a3"]


async def test_an_engine_that_loads_claims_no_further_loads(bus: Bus) -> None:
    """Base requests and held adapters pass those that need one more load."""
    gateway = await bus.gateway("g1")
    one, _ = await two(bus, loading("a@1"), loading())
    for at in range(4):
        await gateway.submit(adapted(f"c{at}", f"c{at}@1"), bounds=LATE)
    await gateway.submit(adapted("held", "a@1"), bounds=LATE)
    await gateway.submit(ask("base", prompt(3, 20)), bounds=LATE)
    got: list[str] = []
    for _ in range(4):  # a claim is a share of the queue
        got += ids(await sync(one, "e1", loading(loads=MAX_LOADS)))
    assert sorted(got) == ["base", "held"]
    assert len(ids(await sync(one, "e1", loading(loads=MAX_LOADS - 1)))) == 1


async def test_a_rare_adapter_waits_a_bounded_time(bus: Bus) -> None:
    """The holder never asks: after LOADS_PASSED loads another engine claims the request."""
    gateway = await bus.gateway("g1")
    _, other = await two(bus, loading("a@1", load_us=20_000.0), loading(load_us=20_000.0))
    await gateway.submit(adapted("a", "a@1"), bounds=LATE)
    claimed: list[str] = []
    while not claimed:
        reply = await sync(other, "e2", loading(load_us=20_000.0))
        claimed = ids(reply)
        assert claimed or 0 < reply.retry_ms <= 1000
        await asyncio.sleep(reply.retry_ms / 1000)


async def test_an_engine_claims_of_further_tenants_after_it_has_left_all_of_one(bus: Bus) -> None:
    """What it claims counts as held for all tenants, those included of which it has left everything."""
    gateway = await bus.gateway("g1")
    holder, other = await two(bus, holding(shared := prompt(1, 500)), SLOW)
    await gateway.submit(ask("left", shared, tenant="t0"), bounds=LATE)
    for at in range(1, 6):
        await gateway.submit(ask(f"r{at}", prompt(10 + at, 200), tenant=f"t{at}"), bounds=LATE)
    assert ids(await sync(other, "e2")) == ["r1"]  # with it, the other engine is ahead for the rest
    assert "left" in ids(await sync(holder, "e1"))
