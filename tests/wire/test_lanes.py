"""The two lanes of the queue in a real Redis: who is claimed first, who moves, what is guaranteed, what is bounded."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import NO_BOUNDS
from quire.engine.wire.layout import MOVES, TENANTS_SHOWN
from quire.engine.wire.messages import Beams, Finish, Generate, Sampling
from quire.engine.wire.records import ANY_TOKENS, LaneQueue, Place, QueueBounds, TenantQueue
from quire.engine.wire.scripts import Script
from tests.pace import paced
from tests.wire.sides import LATE, Bus, batch, generate, ids, load, read, take, within


def soon(target_ms: int) -> QueueBounds:
    """Join the on-time lane, for this long."""
    return QueueBounds(target_ms=target_ms)


async def test_the_room_decides_the_lane_and_beyond_both_bounds_nothing_is_queued(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await take(engine, tokens=100)
    bounds = QueueBounds(20, 60)
    lanes = [(await gateway.submit(generate(f"r{at}", 40), bounds=bounds)).lane for at in range(6)]
    # Free capacity of 100 and 20 fits three; then 160 of both lanes fit a fourth.
    assert lanes == ["on_time", "on_time", "on_time", "late", None, None]
    fleet = await gateway.fleet()
    assert (fleet.on_time.requests, fleet.on_time.tokens) == (3, 120)
    assert (fleet.late.requests, fleet.late.tokens, fleet.queued, fleet.queued_tokens) == (1, 40, 4, 160)
    assert fleet.tenants[""].late_tokens == 40


async def test_engines_claim_the_on_time_lane_first_and_fill_their_room_from_the_late_one(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.0)
    for name, bounds in (("late 1", LATE), ("a", within(1000)), ("late 2", LATE), ("b", within(1000))):
        await gateway.submit(generate(name, 10), bounds=bounds)
    assert ids(await take(engine, tokens=35)) == ["a", "b", "late 1"]
    assert ids(await take(engine, tokens=35)) == ["late 2"]
    assert (await gateway.fleet()).late == LaneQueue()


async def test_a_request_that_does_not_fit_keeps_the_room_from_smaller_ones_behind_it(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("long", 50))
    await gateway.submit(generate("short", 5), bounds=LATE)
    assert ids(await take(engine, tokens=49)) == []
    assert ids(await take(engine, tokens=55)) == ["long", "short"]


async def test_a_search_counts_for_the_first_blocks_of_its_beams(bus: Bus) -> None:
    """Each of two gateways would have seen capacity for its own search; the queue has capacity for one."""
    one, other, engine = await bus.gateway("g1"), await bus.gateway("g2"), await bus.engine()
    await take(engine, tokens=100)
    bounds = QueueBounds(0, -ANY_TOKENS, extra_tokens=48)
    assert (await one.submit(generate("a", 10, beams=Beams(4)), bounds=bounds)).accepted
    assert (await one.fleet()).queued_tokens == 58
    assert not (await other.submit(generate("b", 10, beams=Beams(4)), bounds=bounds)).accepted
    assert (await other.submit(generate("plain", 42), bounds=within(0))).accepted
    assert ids(await take(engine, tokens=57)) == []
    assert ids(await take(engine, tokens=58)) == ["a"]
    claimed = await take(engine, tokens=100)
    assert ids(claimed) == ["plain"]
    assert (await one.fleet()).queued_tokens == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
async def test_a_lasting_overload_leaves_the_late_lane_its_share(bus: Bus, share: float) -> None:
    """Both lanes never empty.  The sizes differ, and a late request is as large as ten on-time ones."""
    gateway, engine = await bus.gateway(), await bus.engine(late_share=share)
    claimed = {"on": 0, "late": 0}
    for at in range(60):
        await gateway.submit(*(generate(f"on {at} {i}", 5 + i) for i in range(4)), bounds=within(ANY_TOKENS))
        await gateway.submit(generate(f"late {at}", 70), bounds=LATE)
        for request in (await take(engine, tokens=70)).generates:
            claimed[request.id.split()[0]] += len(request.token_ids)
    part = claimed["late"] / sum(claimed.values())
    assert sum(claimed.values()) > 1000
    assert share <= part + 70 / sum(claimed.values())
    assert part <= share + 70 / sum(claimed.values())


async def test_what_the_late_lane_gets_of_idle_room_is_not_held_against_it(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.5)
    for at in range(20):
        await gateway.submit(generate(f"late {at}", 10), bounds=LATE)
    assert len(ids(await take(engine, tokens=100))) == 10
    for at in range(4):
        await gateway.submit(generate(f"on {at}", 10))
    assert ids(await take(engine, tokens=30)) == ["on 0", "late 10", "on 1"]


async def test_a_request_that_has_waited_for_its_target_moves_to_the_late_lane(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.0)
    await gateway.submit(generate("old"), bounds=soon(20))
    await gateway.submit(generate("older"), bounds=LATE)
    await asyncio.sleep(0.03)
    await gateway.submit(generate("new"), bounds=soon(60_000))
    assert (await gateway.fleet()).late.requests == 2
    assert await gateway.places(["new", "old", "older", "none"]) == {
        "new": Place("on_time", 0),
        "old": Place("late", 1),
        "older": Place("late", 2),
    }
    assert ids(await take(engine)) == ["new", "old", "older"]  # as they arrived


async def test_a_claim_moves_overdue_requests_that_no_reading_has_moved(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.0)
    for name in ("a", "b"):
        await gateway.submit(generate(name), bounds=soon(20))
    await asyncio.sleep(0.03)
    await gateway.submit(generate("new"), bounds=soon(60_000))
    assert ids(await take(engine)) == ["new", "a", "b"]


async def test_one_script_moves_a_bounded_number(bus: Bus) -> None:
    gateway = await bus.gateway()
    for at in range(2 * MOVES + 10):
        await gateway.submit(generate(f"r{at}", 1), bounds=soon(1))
    await asyncio.sleep(0.01)
    fleet = await gateway.fleet()
    assert (fleet.on_time.requests, fleet.late.requests) == (10, 2 * MOVES)  # by age, then from the head
    assert (await gateway.fleet()).on_time.requests == 0


async def test_a_dead_engines_requests_return_to_their_lanes_and_those_that_have_begun_to_the_front(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine("e1")
    await gateway.submit(generate("on 1"))
    for name in ("late 1", "late 2"):
        await gateway.submit(generate(name), bounds=LATE)
    assert len(ids(await take(engine))) == 3
    await engine.sync([("g1", batch("late 2", 0))], [], load("e1"), 0, 0)
    await gateway.submit(generate("on 2", priority=-100))
    await engine.close(died=True)
    fleet = await gateway.fleet()
    assert (fleet.on_time.requests, fleet.late.requests) == (3, 1)
    other = await bus.engine("e2")
    assert ids(await take(other, "e2")) == ["late 2", "on 2", "on 1", "late 1"]


async def test_what_has_begun_does_not_become_overdue(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine("e1")
    await gateway.submit(generate("a"), bounds=soon(1))
    await take(engine)
    await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    await engine.close(died=True)
    await asyncio.sleep(0.01)
    fleet = await gateway.fleet()
    assert (fleet.on_time.requests, fleet.late.requests) == (1, 0)


async def test_a_client_that_leaves_while_late_leaves_nothing(bus: Bus, redis_server: EmbeddedRedis) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"), bounds=LATE)
    await gateway.cancel("a")
    assert (await gateway.fleet()).queued == 0
    assert ids(await take(engine)) == []
    with redis.Redis.from_url(redis_server.url) as client:
        kept = {key.split(b":")[1] for key in client.scan_iter(f"{{{bus.namespace}}}:*")}
    assert not kept & {b"queue", b"turns", b"ages", b"queued_tokens", b"queued_bytes", b"due", b"late_credit"}


async def test_a_deadline_that_passes_in_the_late_lane_ends_the_request(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    now_ms = (await gateway.fleet()).time_ms
    await gateway.submit(Generate("a", "g1", [1], 1, Sampling(), now_ms + 30), bounds=LATE)
    await asyncio.sleep(0.04)
    assert (await gateway.fleet()).queued == 0
    [told] = await read(gateway, 1)
    assert told.deltas[0].finish == Finish("deadline")
    assert ids(await take(engine)) == []


async def test_a_dead_gateways_late_requests_are_withdrawn_after_the_grace_and_never_claimed(
    bus: Bus, redis_server: EmbeddedRedis
) -> None:
    grace_s = paced(0.05)
    gateway, engine = await bus.gateway("g2", grace_s=grace_s), await bus.engine()
    dead = await bus.gateway("g1", grace_s=grace_s)
    await dead.fleet()
    await dead.submit(generate("a"), bounds=LATE)
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(f"{{{bus.namespace}}}:gateway:g1")  # it has not read the fleet for long
    assert (await gateway.fleet()).late.requests == 1
    await asyncio.sleep(1.1 * grace_s)
    assert (await gateway.fleet()).late.requests == 0
    assert ids(await take(engine)) == []


async def test_both_lanes_survive_a_restart_of_redis(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine(late_share=0.0)
    await gateway.submit(generate("held"), bounds=LATE)
    assert ids(await take(engine)) == ["held"]
    await gateway.submit(generate("late", 30), bounds=LATE)
    await gateway.submit(generate("on", 20))
    before = await gateway.fleet()
    own_server.stop()
    own_server.start()
    after = await gateway.fleet()
    assert (after.late.requests, after.late.tokens) == (before.late.requests, before.late.tokens) == (1, 30)
    assert (after.on_time.requests, after.on_time.tokens) == (1, 20)
    assert await gateway.places(["late", "on"]) == {"late": Place("late", 1), "on": Place("on_time", 0)}
    assert ids(await take(engine)) == ["on", "late"]


async def test_a_passed_deadline_in_either_lane_does_not_keep_what_is_behind_it(bus: Bus) -> None:
    """The head of each lane is past its deadline: a claim ends both and takes what is behind."""
    gateway, engine = await bus.gateway(), await bus.engine()
    now_ms = (await gateway.fleet()).time_ms
    for name, bounds in (("a", within(ANY_TOKENS)), ("b", LATE)):
        await gateway.submit(Generate(name, "g1", [1], 1, Sampling(), now_ms + 40), bounds=bounds)
    await gateway.submit(generate("c"), bounds=LATE)
    await asyncio.sleep(0.05)
    assert ids(await take(engine)) == ["c"]


async def test_the_queue_is_bounded_in_requests_and_in_bytes(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    few = QueueBounds(max_requests=2)
    assert (await gateway.submit(generate("a"), generate("b"), bounds=few)).accepted
    full = await gateway.submit(generate("c"), bounds=few)
    assert (full.accepted, full.full, full.queued) == (False, True, 2)
    assert (await gateway.submit(generate("a"), generate("b"), bounds=few)).accepted  # a retry of what is queued
    await take(engine)
    assert (await gateway.submit(generate("c"), bounds=few)).accepted  # only what waits counts
    small = QueueBounds(max_bytes=1500)
    assert (await gateway.submit(generate("d", 200), bounds=small)).accepted
    assert (await gateway.submit(generate("e", 1200), bounds=small)).full
    refused = await gateway.submit(generate("f", 1200), bounds=QueueBounds(-ANY_TOKENS, -ANY_TOKENS, max_requests=1))
    assert (refused.accepted, refused.full) == (False, False)  # it has no free capacity anyway: 429


async def test_a_tenant_keeps_its_counter_when_its_only_request_moves(bus: Bus) -> None:
    """A move is no arrival: it does not lift the counter to those of others."""
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.0)
    await gateway.submit(generate("x", 50, tenant="busy"))
    await take(engine)
    await gateway.submit(generate("quiet", 10, tenant="quiet"), bounds=soon(20))
    before = (await gateway.fleet()).tenants["quiet"].counter
    await gateway.submit(generate("y", 10, tenant="busy"), bounds=LATE)
    await asyncio.sleep(0.03)
    fleet = await gateway.fleet()
    assert fleet.late.requests == 2
    assert fleet.tenants["quiet"].counter == before


async def test_an_engine_claims_what_it_can_compute_soon_and_the_rest_stays_in_the_lanes(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine(late_share=0.0)
    for name in ("a", "b", "c"):
        await gateway.submit(generate(name, 10), bounds=within(1000))

    async def claim(tokens: int) -> list[str]:
        return ids(await engine.sync([], [], load("e1"), 1000, 10, claim_tokens=tokens))

    assert await claim(0) == []
    assert await claim(11) == ["a", "b"]  # the one that exceeds it is the last one
    # The remaining capacity is still offered, and a small request overtakes requests that were not claimed.
    assert (await gateway.fleet()).free_tokens == 980
    small = QueueBounds(target_ms=600_000, size_class=0)
    await gateway.submit(generate("d", 500), bounds=QueueBounds(target_ms=600_000, size_class=2))
    await gateway.submit(generate("e", 5), bounds=small)
    assert await claim(1) == ["c"]
    assert await claim(1) == ["e"]
    assert await claim(1) == ["d"]  # however long it is


WALK = """
local left_out, waits = {}, {}
for at = 1, 8 do
  call('HSET', P .. 'counters', 't' .. at, 10 * (at % 3))
  enter_lane('on_time', 't' .. at, 'on ' .. at, at, 1, 0)
  if at <= 3 then enter_lane('late', 't' .. at, 'late ' .. at, at, 1, 0) end
end
local function agrees(lane)
  local wanted, without = nil, left_out[lane]
  for _, tenant in ipairs(call('ZRANGE', P .. 'turns:' .. lane, 0, -1)) do
    if not wanted and not (without and without.names[tenant]) then wanted = tenant end
  end
  local found = next_tenant(lane, left_out)
  if found ~= wanted then error(tostring(found) .. ' instead of ' .. tostring(wanted)) end
  return found
end
for at = 1, #ARGV, 2 do
  local what, lane = ARGV[at], ARGV[at + 1]
  local tenant = agrees(lane)
  if tenant and what == 'leave out' then leave_out(left_out, lane, tenant) end
  if tenant and what == 'claim' then
    charge(tenant, 15)
    note_turn(left_out, lane, tenant)
  end
  tenant = what == 'move' and agrees('on_time')
  if tenant then
    enter_lane('late', tenant, 'on ' .. tenant, 9, 1, 0)
    note_entry(left_out, 'late')
  end
end
return agrees('on_time') and agrees('late') and 1 or 0
"""


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["leave out", "claim", "move"]), st.sampled_from(["on_time", "late"])), max_size=30
    )
)
def test_the_walk_through_the_tenants_that_goes_on_finds_the_one_that_a_new_one_would(
    redis_server: EmbeddedRedis, steps: list[tuple[str, str]]
) -> None:
    """Also where tenants are left out in one lane and claimed in the other, or enter a lane in front."""
    with redis.Redis.from_url(redis_server.url) as client:
        words = [word for step in steps for word in step]
        assert client.eval(Script(WALK).source, 1, f"{{{uuid.uuid4().hex}}}:", *words) in (0, 1)


async def test_a_reading_names_the_tenants_that_are_next_and_counts_all(bus: Bus) -> None:
    """However many wait; a submit names its own tenant only."""
    gateway, weights = await bus.gateway(), {"tail": 2.0}
    names = [f"t{at:03}" for at in range(2 * TENANTS_SHOWN)] + ["tail"]
    for at, name in enumerate(names):
        own = weights.get(name, 1.0)
        queue = await gateway.submit(generate(name, 10, tenant=name, weight=own), bounds=LATE if at % 2 else NO_BOUNDS)
        assert queue.tenants == {name: TenantQueue(10, 0.0, own, 10 if at % 2 else 0)}
        assert (queue.queued, queue.queued_tokens) == (at + 1, 10 * (at + 1))
    fleet = await gateway.fleet()
    late = len(names) // 2
    assert set(fleet.tenants) == set(names[0 : 2 * TENANTS_SHOWN])
    assert (fleet.on_time.requests, fleet.on_time.tokens, fleet.on_time.tenants) == (
        late + 1,
        10 * (late + 1),
        late + 1,
    )
    assert (fleet.late.requests, fleet.late.tokens, fleet.late.tenants) == (late, 10 * late, late)
    assert fleet.unnamed_tokens() == (10, 0)
    for name in names:
        await gateway.cancel(name)
    fleet = await gateway.fleet()
    assert (fleet.tenants, fleet.on_time, fleet.late) == ({}, LaneQueue(), LaneQueue())
    with redis.Redis.from_url(bus.url) as client:
        assert not client.exists(f"{{{bus.namespace}}}:lanes")


async def test_a_submit_asks_redis_as_much_with_many_engines_and_tenants_as_with_few(bus: Bus) -> None:
    gateway = await bus.gateway()
    counts: list[int] = []

    async def count(name: str) -> None:
        with redis.Redis.from_url(bus.url) as client:
            before = sum(one["calls"] for one in client.info("commandstats").values())
            queue = await gateway.submit(generate(name, tenant=name))
            counts.append(sum(one["calls"] for one in client.info("commandstats").values()) - before)
            assert queue.free_tokens == 100 * len(engines)

    engines: list[str] = []
    for name in ("first", "second"):
        await count(name)
        for at in range(12):
            engines.append(f"e{name}{at}")
            await (await bus.engine(engines[-1])).sync([], [], load(engines[-1]), 100, 1, claim_tokens=0)
            await gateway.submit(generate(f"{name}{at}", tenant=f"{name}{at}"))
    await count("third")
    assert counts[1:] == [counts[1]] * 2
