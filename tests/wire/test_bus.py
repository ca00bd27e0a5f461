"""Both sides of the bus on a real Redis: several gateways and engines, deaths, lost replies, full memory, versions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import deque
from typing import Any

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.common.errors import OperatorError
from quire.engine.wire import link
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import READ_DELTAS, GatewaySide
from quire.engine.wire.layout import LAYOUT_VERSION, OUTPUT_COST
from quire.engine.wire.link import BusDown, VersionMismatch
from quire.engine.wire.messages import WIRE_VERSION, Abort, Delta, EngineLoad, Finish, Generate, Sampling, TokenBatch
from quire.engine.wire.records import SyncReply
from tests.pace import patience, python_s, until
from tests.wire.sides import (
    LONG_MS,
    PLENTY,
    Bus,
    answer,
    batch,
    generate,
    ids,
    load,
    read,
    read_deltas,
    subscribed,
    take,
    within,
)

pytestmark = pytest.mark.every_redis

# A few bytes per tenant.
KEPT = (b"arrivals", b"changes", b"counters", b"weights", b"left", b"usage", b"layout", b"offered")


async def test_a_request_goes_down_and_its_tokens_come_up(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    request = generate("a", 12)
    await gateway.submit(request)
    assert (fleet := await gateway.fleet()).queued == 1
    assert (fleet.queued_tokens, fleet.engines) == (12, [])
    began_ms = time.time() * 1000 - 1
    assert await take(engine) == SyncReply([request], [])
    sent = [batch("a", 0), batch("a", 1)]
    await engine.sync([("g1", sent[0])], [], load("e1"), 0, 0)
    await engine.sync([("g1", sent[1])], ["a"], last := load("e1"), 0, 0)
    assert await read(gateway, 2) == sent
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens, fleet.engines) == (0, 0, [last])
    assert began_ms <= fleet.exchanged_ms["e1"] <= fleet.time_ms <= time.time() * 1000 + 1  # one machine, one clock
    assert fleet.exchanged_ms.keys() == {"e1"}
    await asyncio.sleep(0.05)
    again = await gateway.fleet()
    assert again.exchanged_ms == fleet.exchanged_ms  # reading the fleet is no sign of an engine's life
    await engine.sync([], [], last, 0, 0)
    # A sync is, whatever its load.
    assert (await gateway.fleet()).exchanged_ms["e1"] >= fleet.exchanged_ms["e1"] + 50


async def test_claims_are_first_come_first_served_and_fit_the_room(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for name, tokens in (("a", 10), ("b", 10), ("c", 50), ("d", 1)):
        await gateway.submit(generate(name, tokens))
    assert ids(await take(engine, requests=0)) == []
    assert ids(await take(engine, tokens=69)) == ["a", "b"]  # c does not fit any more, and d does not overtake it
    assert ids(await take(engine, requests=1)) == ["c"]
    assert ids(await take(engine)) == ["d"]


async def test_within_a_tenant_priority_goes_before_arrival(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    for name, priority in (("late", 100), ("a", 0), ("b", 0), ("first", -100)):
        await gateway.submit(generate(name, priority=priority))
    assert ids(await take(dying, requests=2)) == ["first", "a"]
    await gateway.submit(generate("c", priority=-1))
    bus.lapse("e1")
    await gateway.fleet()  # what the dead engine held goes back to its place, not to the head
    assert ids(await take(other, "e2")) == ["first", "c", "a", "b", "late"]


async def test_an_expired_request_is_never_claimed_and_its_gateway_hears_so(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    soon = int(time.time() * 1000) + 50
    await gateway.submit(Generate("a", "g1", [1, 2], 1, Sampling(seed=2**63 - 1), soon, n=2))
    await gateway.submit(generate("b"))
    await asyncio.sleep(0.06)
    assert ids(await take(engine)) == ["b"]
    [told] = await read(gateway, 1)
    assert told == TokenBatch("", [Delta("a", 0, [], Finish("deadline"), index) for index in range(2)])
    await gateway.submit(Generate("c", "g1", [1], 1, Sampling(), soon))
    assert (await gateway.fleet()).queued == 0  # a look at the fleet is enough
    assert ids(await take(engine)) == []


async def test_a_submit_beyond_the_room_and_its_excess_queues_nothing(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    empty = await gateway.submit(generate("a", 10), bounds=within(9))  # no engine yet, so no free capacity
    assert (empty.accepted, empty.queued, empty.free_tokens) == (False, 0, 0)
    await take(engine, tokens=100)
    assert (await gateway.submit(generate("a", 60), generate("b", 40), bounds=within(0))).accepted
    for _ in range(2):
        full = await gateway.submit(generate("c", 5), generate("d", 5), bounds=within(9))
        assert (full.accepted, full.queued, full.queued_tokens, full.free_tokens) == (False, 2, 100, 100)
    assert (await gateway.submit(generate("b", 40), bounds=within(0))).accepted  # a retry of what is queued
    assert ids(await take(engine, tokens=100)) == ["a", "b"]
    assert (await gateway.fleet()).free_tokens == 0  # what a sync claims is not offered a second time
    await take(engine, tokens=50)
    assert (await gateway.fleet()).free_tokens == 50
    await take(engine, tokens=50, requests=0)
    assert (await gateway.fleet()).free_tokens == 0  # no free sequence
    await engine.close()
    assert (await gateway.fleet()).free_tokens == 0


async def test_gateways_never_spend_the_same_room_twice(bus: Bus) -> None:
    pool, engine = 1000, await bus.engine()
    gateways = [await bus.gateway(f"g{i}") for i in range(2)]
    held: deque[Generate] = deque()
    most = refused = accepted = 0

    def used() -> int:
        return sum(len(request.token_ids) for request in held)

    async def serve() -> None:
        for _ in range(150):
            done = [held.popleft().id for _ in range(min(1, len(held)))]
            held.extend((await engine.sync([], done, load("e1"), pool - used(), 1000)).generates)
            await asyncio.sleep(0)

    async def hammer(gateway: GatewaySide, name: str) -> None:
        nonlocal most, refused, accepted
        at = 0
        while not serving.done():
            queue = await gateway.submit(generate(f"{name}-{at}", 20 + at % 50), bounds=within(0))
            at += 1
            assert queue.queued_tokens <= queue.free_tokens
            most = max(most, queue.queued_tokens + pool - queue.free_tokens)
            accepted += queue.accepted
            refused += not queue.accepted

    await take(engine, tokens=pool)
    serving = asyncio.create_task(serve())
    await asyncio.gather(serving, *(hammer(gateway, f"g{i}") for i, gateway in enumerate(gateways)))
    assert most <= pool
    assert accepted > 100
    assert refused > 50


class Backlog:
    """An engine with a few slots, one token per step and slot, under the load of its tenants.  Time is steps.  Prompts
    and outputs are `tokens` long in the mean, from half of that to half as much again."""

    def __init__(self, bus: Bus, gateway: GatewaySide, engine: EngineSide, seats: int, tokens: int) -> None:
        self.gateway, self.engine, self.seats, self.tokens = gateway, engine, seats, tokens
        self.dice = random.Random(1)
        self.running: dict[str, list[int]] = {}  # id -> output tokens made, and to make
        self.tenants: dict[str, str] = {}
        self.submitted: dict[str, int] = {}
        self.waits: dict[str, list[int]] = {}
        self.served: dict[str, float] = {}

    async def offer(self, step: int, tenant: str, weight: float = 1.0) -> None:
        name = f"r{len(self.submitted)}"
        self.submitted[name] = step
        self.tenants[name] = tenant
        await self.gateway.submit(generate(name, self.length(), tenant=tenant, weight=weight))

    def length(self) -> int:
        return self.dice.randint(self.tokens // 2, self.tokens * 3 // 2)

    async def step(self, step: int) -> None:
        deltas, finished = [], []
        for name, (made, wanted) in list(self.running.items()):
            deltas.append(Delta(name, made, [made]))
            self.charge(self.tenants[name], OUTPUT_COST)
            self.running[name] = [made + 1, wanted]
            if made + 1 == wanted:
                finished.append(name)
                del self.running[name]
        free = self.seats - len(self.running)
        claimed = await self.engine.sync([("g1", TokenBatch("e1", deltas))], finished, load("e1"), PLENTY[0], free)
        for request in claimed.generates:
            self.running[request.id] = [0, self.length()]
            self.waits.setdefault(request.tenant, []).append(step - self.submitted[request.id])
            self.charge(request.tenant, len(request.token_ids))

    def charge(self, tenant: str, tokens: int) -> None:
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens


async def test_a_tenant_offering_ten_times_as_much_delays_the_quiet_one_little(bus: Bus) -> None:
    backlog = Backlog(bus, await bus.gateway(), await bus.engine(), seats=16, tokens=20)
    for step in range(400):  # 16 slots / 20 steps = 0.8 requests per step; the load is 1.0 and 0.1
        await backlog.offer(step, "loud")
        if step % 10 == 0:
            await backlog.offer(step, "quiet")
        await backlog.step(step)
    quiet, loud = sorted(backlog.waits["quiet"]), sorted(backlog.waits["loud"])
    assert len(quiet) >= 39
    assert quiet[-1] <= 8  # alone it would be 0; a slot becomes free every 1.25 steps on average
    assert loud[-1] > 60
    assert len(quiet) + len(loud) >= 0.97 * 0.8 * 400  # no slot stays empty


async def test_backlogged_tenants_are_served_by_weight_within_the_bound(bus: Bus) -> None:
    backlog = Backlog(bus, await bus.gateway(), await bus.engine(), seats=8, tokens=10)
    weights = {"one": 1.0, "three": 3.0}
    most = 0.0
    for tenant, weight in weights.items():
        for _ in range(280):  # more than its share of the capacity of 8 slots / 10 steps * 400 steps
            await backlog.offer(0, tenant, weight)
    for step in range(400):
        await backlog.step(step)
        shares = [backlog.served.get(tenant, 0.0) / weight for tenant, weight in weights.items()]
        most = max(most, abs(shares[0] - shares[1]))
    # VTC, theorem 4.4: at most twice what a prompt or the tokens of one complete batch are charged.
    assert 0 < most <= 2 * max(15, OUTPUT_COST * 8 * 15)
    assert backlog.served["three"] / backlog.served["one"] == pytest.approx(3, rel=0.1)


async def test_idleness_saves_nothing_up(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for i in range(20):
        await gateway.submit(generate(f"early{i}", 10, tenant="busy"))
        await take(engine)
    for i in range(4):
        await gateway.submit(generate(f"b{i}", 10, tenant="busy"))
        await gateway.submit(generate(f"i{i}", 10, tenant="idle"))
    order = [request for _ in range(8) for request in ids(await take(engine, requests=1))]
    assert [name[0] for name in order] in (list("bibibibi"), list("ibibibib"))


def full(engine: str, preemptible_tokens: int, *crowd: str) -> EngineLoad:
    return msgspec.structs.replace(load(engine), over_share=list(crowd), preemptible_tokens=preemptible_tokens)


async def test_a_full_engine_claims_for_who_holds_less_than_its_share(bus: Bus) -> None:
    """At most what preempting `loud` would free, whichever tenant's turn it is, and no request of `loud`."""
    gateway, engine = await bus.gateway(), await bus.engine()
    for i in range(3):
        await gateway.submit(generate(f"loud{i}", tenant="loud"))
        await gateway.submit(generate(f"quiet{i}", tenant="quiet"))
    assert ids(await engine.sync([], [], full("e1", 0, "loud"), 0, 0)) == []
    assert ids(await engine.sync([], [], full("e1", 25, "loud"), 0, 0)) == ["quiet0", "quiet1"]
    await gateway.submit(generate("quiet3", tenant="quiet"))
    bounded: dict[str, Any] = {"claim_tokens": 0, "preempt_claim_tokens": 0}
    assert ids(await engine.sync([], [], full("e1", 100, "loud"), 0, 0, **bounded)) == []  # enough prompts are pending
    assert ids(await engine.sync([], [], full("e1", 100, "loud"), 0, 0, **bounded | {"preempt_claim_tokens": 1})) == [
        "quiet2"
    ]
    assert ids(await engine.sync([], [], full("e1", 100, "loud", "quiet"), 0, 0)) == []
    assert ids(await engine.sync([], [], full("e1", 100, "loud"), 10, 1)) == ["loud0", "quiet3"]


async def test_nobody_yields_while_another_engine_has_room(bus: Bus) -> None:
    gateway, one, two = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await take(two, "e2", 10, 1)
    await gateway.submit(generate("quiet", tenant="quiet"))
    assert ids(await one.sync([], [], full("e1", 100, "loud"), 0, 0)) == []
    assert ids(await take(two, "e2", 10, 1)) == ["quiet"]
    await gateway.submit(generate("again", tenant="quiet"))
    assert ids(await one.sync([], [], full("e1", 100, "loud"), 0, 0)) == ["again"]


async def test_an_engine_claims_no_more_than_a_tenant_can_start_there(bus: Bus) -> None:
    """A tenant that is close to its share at one engine has its next request claimed by the other."""
    gateway, one, two = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    for i in range(3):
        await gateway.submit(generate(f"quiet{i}", tenant="quiet"))
    await gateway.submit(generate("other", tenant="other"))
    near = msgspec.structs.replace(full("e1", 100, "loud"), preemptible_tokens_of={"quiet": 15})
    assert sorted(ids(await one.sync([], [], near, 0, 0))) == ["other", "quiet0"]
    assert ids(await two.sync([], [], full("e2", 100, "loud"), 0, 0)) == ["quiet1", "quiet2"]


async def test_preemption_does_not_wait_for_free_capacity_that_claims_nothing(bus: Bus) -> None:
    """An engine that has claimed enough prompts for its next steps has free capacity, but claims nothing."""
    gateway, one, two = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await gateway.submit(generate("quiet", tenant="quiet"))
    assert ids(await two.sync([], [], load("e2"), 100, 10, claim_tokens=0)) == []
    assert ids(await one.sync([], [], full("e1", 100, "loud"), 0, 0)) == ["quiet"]
    await gateway.submit(generate("again", tenant="quiet"))
    assert ids(await two.sync([], [], load("e2"), 5, 10)) == []  # too little for it
    assert ids(await one.sync([], [], full("e1", 100, "loud"), 0, 0)) == ["again"]


async def test_a_withdrawn_request_costs_nothing_or_aborts(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for name in ("a", "b"):
        await gateway.submit(generate(name))
    await gateway.cancel("a")
    assert (await gateway.fleet()).queued_tokens == 10
    assert ids(await take(engine)) == ["b"]
    for _ in range(2):
        await gateway.cancel("b")
    await gateway.cancel("never heard of")
    assert await take(engine) == SyncReply([], [Abort("b")])
    assert await take(engine) == SyncReply([], [])


async def test_one_continuation_is_withdrawn_from_whoever_computes_the_request(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await gateway.cancel("never heard of", 1)
    await gateway.submit(generate("a"))
    assert ids(await take(dying)) == ["a"]
    for index in (2, 0):
        await gateway.cancel("a", index)
    assert (await take(dying)).aborts == [Abort("a", index=2), Abort("a", index=0)]
    assert (await take(dying)).aborts == []
    bus.lapse("e1")
    assert (await gateway.fleet()).queued == 1
    claimed = await take(other, "e2")  # the request with its withdrawn choices
    assert (ids(claimed), claimed.aborts) == (["a"], [Abort("a", index=2), Abort("a", index=0)])
    await gateway.cancel("a")
    assert (await take(other, "e2")).aborts == [Abort("a")]
    await gateway.cancel("a", 1)
    assert await take(other, "e2") == SyncReply([], [])


async def test_two_gateways_and_two_engines_share_one_queue(bus: Bus) -> None:
    gateways = [await bus.gateway(f"g{i}") for i in range(2)]
    engines = [await bus.engine(f"e{i}") for i in range(2)]
    for i in range(40):
        await gateways[i % 2].submit(generate(f"r{i}", gateway=f"g{i % 2}"))
    seen: dict[str, str] = {}
    while len(seen) < 40:
        for e, engine in enumerate(engines):
            claimed = (await take(engine, f"e{e}", requests=3)).generates
            assert not seen.keys() & {request.id for request in claimed}
            seen |= {request.id: request.gateway for request in claimed}
            await engine.sync(
                [(request.gateway, batch(request.id, 0)) for request in claimed],
                [request.id for request in claimed],
                load(f"e{e}"),
                0,
                0,
            )
    for g, gateway in enumerate(gateways):
        got = {delta.id for delta in await read_deltas(gateway, 20)}
        assert got == {name for name, owner in seen.items() if owner == f"g{g}"}
    assert {one.engine for one in (await gateways[0].fleet()).engines} == {"e0", "e1"}


async def test_a_burst_is_shared_between_engines_with_room(bus: Bus) -> None:
    gateway, engines = await bus.gateway(), [await bus.engine(f"e{i}") for i in range(3)]
    for e, engine in enumerate(engines):
        await take(engine, f"e{e}")  # from now on it counts
    for i in range(12):
        await gateway.submit(generate(f"r{i:02}"))
    shares = [ids(await take(engine, f"e{e}")) for e, engine in enumerate(engines)]
    assert list(map(len, shares)) == [4, 3, 2]
    assert [request for share in shares for request in share] == [f"r{i:02}" for i in range(9)]
    assert ids(await take(engines[0], "e0")) == ["r09"]


async def test_a_dead_engines_requests_return_to_the_head_in_order(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    for name in "abcd":
        await gateway.submit(generate(name))
    assert ids(await take(dying, requests=3)) == ["a", "b", "c"]
    await gateway.cancel("b")
    bus.lapse("e1")
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens, fleet.engines) == (3, 30, [])
    assert ids(await take(other, "e2")) == ["a", "c", "d"]


async def test_a_late_engine_keeps_what_nobody_took_and_loses_the_rest(bus: Bus) -> None:
    gateway, late, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    for name in "abc":
        await gateway.submit(generate(name))
    assert ids(await take(late)) == ["a", "b", "c"]
    bus.lapse("e1")
    await gateway.fleet()
    assert ids(await take(other, "e2", requests=1)) == ["a"]
    await gateway.cancel("b")
    back = await take(late)
    assert (back.generates, sorted(back.reassigned)) == ([], ["a", "b"])
    assert (await gateway.fleet()).queued == 0
    await late.sync([], ["a", "c"], load("e1"), 0, 0)  # it had finished a all the same: too late
    assert await take(other, "e2") == SyncReply([], [])


async def test_closing_or_reopening_an_engine_gives_back_what_it_held(bus: Bus) -> None:
    gateway, first = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    assert ids(await take(first)) == ["a"]
    again = await bus.engine()  # the same name: the first process crashed, its lease still runs
    assert ids(await take(again)) == ["a"]
    with pytest.raises(BusDown, match="newer process"):
        await take(first)
    await first.close()  # must not take the newer one's requests away
    assert (await gateway.fleet()).queued == 0
    await again.close()
    assert (await gateway.fleet()).queued == 1


class CuttingProxy:
    """A proxy between a side of the bus and Redis; on demand it forwards a request and drops the reply."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._path = server.url.removeprefix("unix://")
        self.cut_after: bytes | None = None  # the next request containing this loses its reply and its connection
        self.cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        up_reader, up_writer = await asyncio.open_unix_connection(self._path)
        doomed = False

        async def down() -> None:
            while data := await up_reader.read(65536):
                if doomed:  # the server has executed it: now the line breaks
                    self.cuts += 1
                    writer.transport.abort()
                    return
                writer.write(data)

        back = asyncio.create_task(down())
        try:
            while data := await reader.read(65536):
                if self.cut_after is not None and self.cut_after in data:
                    doomed, self.cut_after = True, None
                up_writer.write(data)
        except ConnectionError:
            pass
        finally:
            back.cancel()
            up_writer.close()
            writer.close()
            self._tasks.discard(task)


async def test_a_reply_lost_after_the_work_was_done_repeats_nothing(redis_server: EmbeddedRedis, bus: Bus) -> None:
    async with CuttingProxy(redis_server) as proxy:
        gateway, engine = await bus.gateway(), await bus.engine(url=proxy.url)
        cut_gateway = await bus.gateway("g2", proxy.url)
        await take(engine)  # scripts are loaded: from here on one request is one sync
        proxy.cut_after = b"submitted-once"
        await cut_gateway.submit(generate("submitted-once"))
        assert (await gateway.fleet()).queued == 1
        for name in ("b", "c", "d"):
            await gateway.submit(generate(name))
        await engine.sync([], [], load("e1"), *PLENTY)
        await gateway.cancel("c")
        await gateway.submit(generate("e"))
        proxy.cut_after = b"EVALSHA"
        got = await engine.sync([("g1", batch("b", 0))], ["d"], load("e1"), 1000, 1)
        assert (ids(got), got.aborts) == (["e"], [Abort("c")])
        proxy.cut_after = b"EVALSHA"
        assert await take(engine) == SyncReply([], [])
        await engine.sync([("g1", batch("b", 1))], [], load("e1"), 0, 0)
        assert [one.deltas[0].first for one in await read(gateway, 2)] == [0, 1]
        await cut_gateway.close()
        await engine.close()
        assert proxy.cuts == 3
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens) == (3, 30)  # submitted-once, b and e; c and d ended


async def test_nothing_is_lost_over_a_restart_of_the_server(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    for name in "ab":
        await gateway.submit(generate(name))
    assert ids(await take(engine, requests=1)) == ["a"]
    reading = asyncio.create_task(answer(gateway, "a"))
    await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    own_server.stop()
    sending = asyncio.create_task(engine.sync([("g1", batch("a", 1))], [], load("e1"), *PLENTY))
    ringing = asyncio.create_task(engine.wait_for_wakeup())
    await asyncio.sleep(0.2)
    own_server.start()
    assert ids(await sending) == ["b"]
    await ringing  # a reconnect rings
    own_server.stop()
    own_server.start()
    await engine.sync([("g1", batch("a", 2))], [], load("e1"), 0, 0)
    last = TokenBatch("e1", [Delta("a", 3, [3], Finish("length"))])
    await engine.sync([("g1", last)], ["a"], load("e1"), 0, 0)
    assert await reading == [[0, 1, 2, 3]]
    ringing = asyncio.create_task(engine.wait_for_wakeup())
    await gateway.submit(generate("c"))
    await asyncio.wait_for(ringing, patience(100))
    assert ids(await take(engine)) == ["c"]


async def test_a_gateway_whose_tokens_were_cut_off_says_so_and_misses_none(
    own_server: EmbeddedRedis, own_bus: Bus
) -> None:
    """Redis cuts off a subscriber that reads too slowly, and keeps no message for it."""
    gateway, engine = await own_bus.gateway(), await own_bus.engine(lease_ms=LONG_MS)
    await gateway.submit(generate("a"))
    await take(engine)
    await gateway.fleet()
    assert not (await gateway.fleet()).forgotten
    with redis.Redis.from_url(own_server.url) as client:
        for position in range(3):  # each is published while the gateway does not listen
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await engine.sync([("g1", batch("a", position))], [], load("e1"), 0, 0)
        reading = asyncio.create_task(answer(gateway, "a"))
        await subscribed(client, own_bus.namespace)
        last = TokenBatch("e1", [Delta("a", 3, [3], Finish("length"))])
        await engine.sync([("g1", last)], ["a"], load("e1"), 0, 0)
        assert await reading == [[0, 1, 2, 3]]


async def test_a_subscription_asks_a_silent_server_whether_it_is_there(
    own_server: EmbeddedRedis, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "BLOCK_MS", 50)
    gateway, engine = await own_bus.gateway(), await own_bus.engine(lease_ms=LONG_MS)
    reading = asyncio.create_task(read(gateway, 1))
    await until(lambda: gateway.rounds > 4)
    await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    assert [one.deltas[0].first for one in await reading] == [0]


async def test_without_a_server_the_gateway_hears_so_within_bounds(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await gateway.submit(generate("a"))
    own_server.stop()
    began = time.monotonic()
    results = await asyncio.gather(
        gateway.submit(generate("b")), gateway.fleet(), gateway.cancel("a"), return_exceptions=True
    )
    assert 1.5 < time.monotonic() - began < patience(30)  # 2 s and the way there; without bounds, for ever
    assert isinstance(results[0], BusDown)
    assert isinstance(results[1], BusDown)
    assert results[2] is None
    assert "unix://" in str(results[0])
    assert "\n" not in str(results[0])
    own_server.start()
    await gateway.fleet()  # starts the withdrawals of a and b that were kept
    await gateway.withdrawn()
    assert (await gateway.fleet()).queued == 0
    assert ids(await take(engine)) == []


async def test_full_memory_refuses_new_work_and_lets_old_work_end(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await gateway.submit(generate("a"))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BusDown, match="OOM"):
            await gateway.submit(generate("b", 100_000))
        assert ids(await take(engine)) == ["a"]
        await engine.sync([("g1", TokenBatch("e1", [Delta("a", 0, [1], Finish("length"))]))], ["a"], load("e1"), 0, 0)
        assert (await read(gateway, 1))[0].deltas[0].finish == Finish("length")
        client.config_set("maxmemory", "0")
    await gateway.submit(generate("c"))


async def test_what_ended_goes_away(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    await take(engine)
    reading = asyncio.create_task(read(gateway, 601))
    for position in range(600):
        await engine.sync([("g1", batch("a", position))], [], load("e1"), 0, 0)
    with redis.Redis.from_url(redis_server.url) as client:
        await engine.sync([("g1", batch("a", 600))], ["a"], load("e1"), 0, 0)
        await reading
        await engine.close()
        for key in client.scan_iter(f"{{{bus.namespace}}}:*"):  # all else has an end
            assert client.pttl(key) > 0 or key.split(b":")[1] in KEPT, key


async def test_a_request_nobody_ends_expires(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway = await bus.gateway()
    late = int(time.time() * 1000) - 59_950  # EXPIRY ends in 50 ms
    await gateway.submit(Generate("a", "g1", [1, 2], 1, Sampling(), late))
    await asyncio.sleep(0.1)
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens) == (0, 0)


async def test_a_prompt_of_32k_tokens(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    request = Generate("a", "g1", list(range(100_000, 132_768)), 5, Sampling(), int(time.time() * 1000) + LONG_MS)
    await gateway.submit(request)
    assert (await take(engine)).generates == [request]


async def test_the_bell_rings_at_once(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    delays, writes = [], []
    for i in range(20):
        await take(engine)  # an engine is woken once between two syncs
        ringing = asyncio.create_task(engine.wait_for_wakeup())
        await asyncio.sleep(0.002)
        began = time.perf_counter()
        await gateway.submit(generate(f"r{i}"))
        writes.append(time.perf_counter() - began)
        await asyncio.wait_for(ringing, patience(100))
        delays.append(time.perf_counter() - began)
    # One more message, not the end of an interval.
    assert statistics.median(delays) < max(5 * statistics.median(writes), link.BLOCK_MS / 1000 / 10)
    await take(engine)
    ringing = asyncio.create_task(engine.wait_for_wakeup())
    await gateway.cancel("r0")
    await asyncio.wait_for(ringing, patience(100))
    assert (await take(engine)).aborts == [Abort("r0")]


async def test_an_exchange_costs_the_engine_little_cpu(bus: Bus) -> None:
    engine = await bus.engine()
    full = TokenBatch("e1", [Delta(f"cmpl-{i:032x}", 7, [i]) for i in range(256)])
    await engine.sync([("g1", full)], [], load("e1"), 0, 0)
    costs = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(40):
            await engine.sync([("g1", full)], [], load("e1"), 0, 0)
        costs.append((time.process_time() - began) / 40)
    assert min(costs) <= 2 * python_s()  # 1 ms


async def test_a_malformed_or_unreachable_address_is_one_line() -> None:
    with pytest.raises(BusDown, match="http://nowhere"):
        GatewaySide("http://nowhere", "g")
    side = EngineSide("redis://:secret@127.0.0.1:1/0", "e")
    with pytest.raises(BusDown, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await side.open()
    assert "secret" not in str(caught.value)
    await side.close()


async def test_a_reader_with_much_to_read_lets_others_have_their_turn(bus: Bus) -> None:
    """Between messages that have come already the event loop serves other tasks."""
    gateway, engine = await bus.gateway(), await bus.engine()
    many = TokenBatch("e1", [Delta(f"cmpl-{i:032x}", 7, [i]) for i in range(READ_DELTAS)])
    for _ in range(8):
        await engine.sync([("g1", many)], [], load("e1"), 0, 0)
    turns, seen = 0, list[int]()

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    await asyncio.sleep(0)  # it has begun
    async with asyncio.timeout(patience(100)), contextlib.aclosing(gateway.batches()) as batches:
        async for _ in batches:
            seen.append(turns)
            if len(seen) == 8:
                break
    task.cancel()
    assert len(set(seen)) == 8


@pytest.mark.parametrize("fields", [{"redis": LAYOUT_VERSION + 1}, {"wire": WIRE_VERSION + 1}, {"redis": 2, "wire": 1}])
async def test_processes_of_another_version_refuse_to_start_in_one_line(
    redis_server: EmbeddedRedis, bus: Bus, fields: dict[str, int]
) -> None:
    await bus.gateway("g1")
    await bus.engine("e1")  # of the same version
    with redis.Redis.from_url(redis_server.url) as client:
        key = f"{{{bus.namespace}}}:layout"
        assert client.hgetall(key) == {b"redis": b"%d" % LAYOUT_VERSION, b"wire": b"%d" % WIRE_VERSION}
        client.hset(key, mapping=fields)
        for opening in (bus.gateway, bus.engine):
            with pytest.raises(VersionMismatch) as caught:
                await opening("new")
            line = str(caught.value)
            assert "\n" not in line
            layout, wire = fields.get("redis", LAYOUT_VERSION), fields.get("wire", WIRE_VERSION)
            assert f"holds Redis layout {layout} and wire {wire}" in line
            assert f"this process has Redis layout {LAYOUT_VERSION} and wire {WIRE_VERSION}" in line
        assert isinstance(caught.value, OperatorError)
        client.delete(key)
    await bus.gateway("g2")


async def test_every_live_engine_is_told_once_to_reset_its_prefix_cache(bus: Bus) -> None:
    gateway, one, dying = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    assert await gateway.operations.reset_prefix_caches() == []  # none has synced yet
    await take(one)
    await take(dying, "e2")
    assert sorted(await gateway.operations.reset_prefix_caches()) == ["e1", "e2"]
    await gateway.submit(generate("a"))
    told = await take(one)
    assert (told.reset_prefix_cache, ids(told), told.aborts) == (True, ["a"], [])
    assert not (await take(one)).reset_prefix_cache
    bus.lapse("e2")  # before it has read the order
    assert await gateway.operations.reset_prefix_caches() == ["e1"]
    await gateway.cancel("a")
    told = await take(one)
    assert (told.reset_prefix_cache, told.aborts) == (True, [Abort("a")])


async def test_a_bell_wakes_an_engine_for_a_reset(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await take(engine)
    woken = asyncio.create_task(engine.wait_for_wakeup())
    await gateway.operations.reset_prefix_caches()
    async with asyncio.timeout(patience(100)):
        await woken
    assert (await take(engine)).reset_prefix_cache
