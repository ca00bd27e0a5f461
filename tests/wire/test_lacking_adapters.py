"""Engines without an adapter's files, in a real Redis: others get its requests, and none waits for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.layout import LACKING_MS, TRIES, WINDOW
from quire.engine.wire.messages import ADAPTERS, CONSTRAINT, LEAVES_ADAPTERS, Delta, Finish, TokenBatch
from quire.engine.wire.prefixes import PrefixReport
from quire.engine.wire.records import QueueBounds, SyncReply
from tests.wire.sides import LATE, Bus, generate, ids, load, read_deltas
from tests.wire.test_locality import FAST, SLOW, adapted, ask, loading, prompt

WHY = "/srv/sql/adapter_config.json: No such file or directory"


class Clock:
    """Redis' clock as far as `lacking` is concerned: lets LACKING_MS pass."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client, self._prefix = client, f"{{{namespace}}}:"

    def tick(self) -> bool:
        """Age what Redis remembers by LACKING_MS.  Returns whether it remembers anything."""
        client: Any = self._client
        lacking = client.zrange(f"{self._prefix}lacking", 0, -1, withscores=True)
        for member, ends in lacking:
            client.zadd(f"{self._prefix}lacking", {member: ends - LACKING_MS})
        for key in client.scan_iter(match=f"{self._prefix}req:*"):
            if lacked := client.hget(key, "lacked"):
                since, tokens = map(int, lacked.split())
                client.hset(key, "lacked", f"{since - LACKING_MS} {tokens}")
        return bool(lacking)


@pytest.fixture
def clock(bus: Bus, redis_server: EmbeddedRedis) -> Iterator[Clock]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield Clock(client, bus.namespace)


async def sync(
    engine: EngineSide,
    name: str,
    report: PrefixReport | None = SLOW,
    *,
    returned: tuple[str, ...] = (),
    room: int = 1_000_000,
    requests: int = 100,
    preemptible_tokens: int = 0,
    **more: Any,
) -> SyncReply:
    own = msgspec.structs.replace(
        load(name), **{"honours": [ADAPTERS], "preemptible_tokens": preemptible_tokens, **more}
    )
    back = dict.fromkeys(returned, WHY)
    return await engine.sync([], [], own, room, requests, report, returned=back)


@pytest.mark.parametrize("report", [SLOW, None], ids=["locality", "in order"])
async def test_an_engine_that_lacks_an_adapter_leaves_its_requests_to_another(
    bus: Bus, report: PrefixReport | None
) -> None:
    """It serves what waits behind them meanwhile; a later request for the adapter is left as well."""
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(one, "e1", report)
    await sync(other, "e2", report, room=0)
    await gateway.submit(adapted("a1", "sql@1"))
    assert ids(await sync(one, "e1", report)) == ["a1"]
    await gateway.submit(generate("base"))
    assert ids(await sync(one, "e1", report, returned=("a1",))) == ["base"]
    await gateway.submit(adapted("a2", "sql@1"))
    await gateway.submit(adapted("b", "chat@1"))
    assert ids(await sync(one, "e1", report)) == ["b"]
    claimed = [ids(await sync(other, "e2", report)) for _ in range(2)]  # a claim is a share of the queue
    assert claimed == [["a1"], ["a2"]]
    assert (await gateway.fleet()).queued == 0


async def test_a_returned_request_keeps_its_place_its_charge_and_its_choices(bus: Bus) -> None:
    """A withdrawn choice stays withdrawn at the next engine."""
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(one, "e1")
    await sync(other, "e2", room=0)
    first = msgspec.structs.replace(adapted("a", "sql@1"), n=3, tenant="t")
    await gateway.submit(first)
    assert ids(await sync(one, "e1")) == ["a"]
    counter = (await gateway.submit(msgspec.structs.replace(generate("later", 5_000), tenant="t"))).tenants["t"].counter
    await gateway.cancel("a", 1)
    await sync(one, "e1", returned=("a",), room=0)
    queue = (await gateway.fleet()).tenants["t"]
    assert queue.counter == counter - len(first.token_ids)
    reply = await sync(other, "e2", loading("sql@1"), requests=1)
    assert ids(reply) == ["a"]
    assert [(one.id, one.index) for one in reply.aborts] == [("a", 1)]
    assert reply.resumed == {}


@pytest.mark.parametrize("others", [0, 1, 2])
async def test_a_request_that_no_engine_can_serve_ends_after_a_bounded_wait(
    bus: Bus, clock: Clock, others: int
) -> None:
    """Each engine looks twice at most: as the request comes, and once LACKING_MS are over."""
    gateway = await bus.gateway()
    engines = {name: await bus.engine(name) for name in [f"e{at}" for at in range(others + 1)]}
    for name, engine in engines.items():
        await sync(engine, name)
    await gateway.submit(adapted("a", "sql@1"))
    looked = 0
    for lap in range(2):
        for name, engine in engines.items():
            assert ids(await sync(engine, name)) == ["a"], f"{name} has not looked in lap {lap}"
            looked += 1
            await sync(engine, name, returned=("a",), room=0)
            assert ids(await sync(engine, name)) == []
        assert clock.tick()
    assert looked == 2 * len(engines)
    [end] = await read_deltas(gateway, 1)
    assert end.finish == Finish("error", message=WHY, code=CONSTRAINT)
    assert (await gateway.fleet()).queued == 0


@pytest.mark.parametrize("other", ["draining", "of another kind"])
async def test_only_an_engine_that_may_serve_it_is_waited_for(bus: Bus, clock: Clock, other: str) -> None:
    gateway, one, two = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(one, "e1")
    changes: dict[str, Any] = {"draining": True} if other == "draining" else {"honours": []}
    await sync(two, "e2", room=0, **changes)
    await gateway.submit(adapted("a", "sql@1"))
    for _ in range(2):
        assert ids(await sync(one, "e1")) == ["a"]
        await sync(one, "e1", returned=("a",), room=0)
        assert clock.tick()
    [end] = await read_deltas(gateway, 1)
    assert end.finish is not None
    assert end.finish.code == CONSTRAINT


NO_LORA: dict[str, Any] = {"honours": [LEAVES_ADAPTERS]}
UNABLE = PrefixReport(token_us=SLOW.token_us, step_us=SLOW.step_us, load_us=-1e6)


@pytest.mark.parametrize("report", [UNABLE, None], ids=["locality", "in order"])
async def test_an_engine_without_lora_returns_one_request_and_leaves_all_others(
    bus: Bus, clock: Clock, report: PrefixReport | None
) -> None:
    """In LACKING_MS it claims one request with an adapter, whatever the adapters, and base requests behind them."""
    gateway, plain, able = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(plain, "e1", report, **NO_LORA)
    await sync(able, "e2", room=0)
    await gateway.submit(adapted("a", "sql@1"))
    assert ids(await sync(plain, "e1", report, **NO_LORA)) == ["a"]
    await sync(plain, "e1", report, returned=("a",), room=0, **NO_LORA)
    for at in range(4):
        await gateway.submit(adapted(f"b{at}", f"chat{at}@1"))
    await gateway.submit(generate("base"))
    claimed = [ids(await sync(plain, "e1", report, **NO_LORA)) for _ in range(6)]
    assert [one for each in claimed for one in each] == ["base"]
    assert clock.tick()
    assert len(ids(await sync(plain, "e1", report, requests=1, **NO_LORA))) == 1  # it looks again, once
    found: list[str] = []
    for _ in range(10):
        found += ids(await sync(able, "e2"))
    assert len(found) == 4
    assert (await gateway.fleet()).queued == 0


async def test_no_request_with_an_adapter_is_left_to_an_engine_without_lora(bus: Bus) -> None:
    """Such an engine has no load to wait for, but is no faster."""
    gateway, plain, able = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(plain, "e1", UNABLE, **NO_LORA)
    await sync(able, "e2", loading(load_us=1e9))
    await gateway.submit(adapted("a", "sql@1"), bounds=LATE)
    assert ids(await sync(able, "e2", loading(load_us=1e9))) == ["a"]


async def test_a_request_that_only_engines_without_lora_see_ends_after_a_bounded_wait(bus: Bus, clock: Clock) -> None:
    gateway, plain = await bus.gateway(), await bus.engine("e1")
    await sync(plain, "e1", UNABLE, **NO_LORA)
    await gateway.submit(adapted("a", "sql@1"))
    for _ in range(2):
        assert ids(await sync(plain, "e1", UNABLE, **NO_LORA)) == ["a"]
        await sync(plain, "e1", UNABLE, returned=("a",), room=0, **NO_LORA)
        assert clock.tick()
    [end] = await read_deltas(gateway, 1)
    assert end.finish == Finish("error", message=WHY, code=CONSTRAINT)


async def test_a_folder_that_appears_is_found_and_one_that_vanishes_later_gets_its_time_again(
    bus: Bus, clock: Clock
) -> None:
    """The engine that found it computes a token and dies; the wait begins anew."""
    gateway, one = await bus.gateway(), await bus.engine("e1")
    await sync(one, "e1")
    await gateway.submit(adapted("a", "sql@1"))
    assert ids(await sync(one, "e1")) == ["a"]
    await sync(one, "e1", returned=("a",), room=0)
    assert clock.tick()
    assert ids(await sync(one, "e1")) == ["a"]
    said = [("g1", TokenBatch("e1", [Delta("a", 0, [7])]))]
    await one.sync(said, [], msgspec.structs.replace(load("e1"), honours=[ADAPTERS]), 0, 0, SLOW)
    bus.lapse("e1")
    await gateway.fleet()
    two = await bus.engine("e2")
    await sync(two, "e2", room=0)
    reply = await sync(two, "e2")
    assert [one.token_ids for one in reply.resumed["a"]] == [[7]]
    await sync(two, "e2", returned=("a",), room=0)
    assert (await gateway.fleet()).queued == 1


async def test_what_waits_behind_many_of_them_starts(bus: Bus) -> None:
    """More than a window of requests that the engine lacks the adapter of; beyond TRIES of them it waits."""
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(one, "e1")
    await sync(other, "e2", room=0)
    await gateway.submit(adapted("first", "sql@1"))
    assert ids(await sync(one, "e1")) == ["first"]
    await sync(one, "e1", returned=("first",), room=0)
    for at in range(2 * WINDOW):
        await gateway.submit(adapted(f"a{at}", "sql@1"))
    await gateway.submit(generate("base"))
    assert 2 * WINDOW < TRIES
    assert ids(await sync(one, "e1")) == ["base"]


async def test_a_preemption_for_fairness_passes_them_as_well(bus: Bus) -> None:
    """Two tenants are below their share; the adapter of the first one's request is not there."""
    gateway, one, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await sync(one, "e1")
    await sync(other, "e2", room=0)
    await gateway.submit(msgspec.structs.replace(adapted("a", "sql@1"), tenant="t1"))
    assert ids(await sync(one, "e1")) == ["a"]
    await sync(one, "e1", returned=("a",), room=0)
    await gateway.submit(msgspec.structs.replace(generate("b"), tenant="t2"))
    assert ids(await sync(one, "e1", room=0, preemptible_tokens=1_000)) == ["b"]


async def test_a_returned_suspect_stays_alone(bus: Bus, clock: Clock) -> None:
    """It has killed engines twice: an engine runs it alone, and without its adapter returns it."""
    gateway = await bus.gateway()
    names = (f"e{at}" for at in itertools.count())
    await gateway.submit(adapted("a", "sql@1"))
    await gateway.submit(adapted("mate", "sql@1"))
    for _ in range(2):
        engine = await bus.engine(name := next(names))
        await sync(engine, name)
        bus.lapse(name)
        await gateway.fleet()
    one, other = await bus.engine("one"), await bus.engine("other")
    await sync(other, "other", room=0, requests=0)
    reply = await sync(one, "one")
    assert len(ids(reply)) == 1
    suspect = ids(reply)[0]
    await sync(one, "one", returned=(suspect,), room=0)
    assert ids(await sync(one, "one")) == []
    assert ids(await sync(other, "other")) == [suspect]
    assert ids(await sync(other, "other")) == []  # it runs a suspect


@pytest.mark.parametrize("seed", range(4))
async def test_random_traffic_reaches_an_engine_that_has_the_adapter_or_ends(
    bus: Bus, clock: Clock, redis_server: EmbeddedRedis, seed: int
) -> None:
    """Three engines with some of three adapters each, three tenants, prompts that share prefixes or not."""
    rng = random.Random(seed)
    gateway = await bus.gateway()
    names = [f"e{at}" for at in range(3)]
    engines = {name: await bus.engine(name) for name in names}
    has = {name: {one for one in "abc" if rng.random() < 0.4} for name in names}
    reports = {name: rng.choice([SLOW, FAST, None]) for name in names}
    for name, engine in engines.items():
        await sync(engine, name, reports[name], room=0)
    asked: dict[str, str] = {}
    for at in range(60):
        request = ask(f"r{at}", prompt(rng.randrange(4), 200), tenant=f"t{rng.randrange(3)}")
        adapter = asked[request.id] = rng.choice(["", "", "a", "b", "c"])
        request = msgspec.structs.replace(request, adapter=f"{adapter}@1" if adapter else "")
        await gateway.submit(request, bounds=rng.choice([LATE, QueueBounds()]))
    served: dict[str, str] = {}
    back: dict[str, list[str]] = {name: [] for name in names}
    for lap in range(200):
        for name in rng.sample(names, 3):
            room = rng.choice([0, 300, 1_000_000])
            reply = await sync(engines[name], name, reports[name], returned=tuple(back[name]), room=room)
            back[name] = [one for one in ids(reply) if asked[one] and asked[one] not in has[name]]
            for one in set(ids(reply)) - set(back[name]):
                assert one not in served
                served[one] = name
        if lap % 8 == 7:
            clock.tick()
        if lap % 8 == 7 and not (await gateway.fleet()).queued and not any(back.values()):
            break
    able = {"", *set().union(*has.values())}
    assert set(served) == {one for one, adapter in asked.items() if adapter in able}
    with redis.Redis.from_url(redis_server.url) as client:
        gone = [one for one in asked if client.hexists(f"{{{bus.namespace}}}:req:{one}", "gone")]
    assert set(gone) == set(asked) - set(served)
