"""How many Redis commands a sync takes: what it costs Redis, as a number that does not depend on the machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.layout import TRIES
from quire.engine.wire.messages import Delta, Finish, TokenBatch
from quire.engine.wire.prefixes import PrefixReport
from tests.wire.sides import LATE, PLENTY, Bus, batch, generate, ids, load, take
from tests.wire.test_locality import SLOW, ask, prompt

QUEUED = 600  # more than Redis keeps as one list
# Commands that keep the sums which submits read in place of all engines and tenants.
OFFER = 2  # commands of a sync whose engine has other free capacity than before
CLAIM = 1  # commands per claimed request
LEASE = 1  # the number of the change, by which readings of the fleet see it
BELLS = 1  # the engine may be woken, or no more
WAKE = 1  # looks for engines to wake, where requests are left


@pytest.fixture
def client(own_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_server.url) as client:
        yield client


async def commands(client: redis.Redis, work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the reply, and how many commands the scripts have run meanwhile."""

    def count() -> int:
        stats: Any = client.info("commandstats")
        around = ("cmdstat_info", "cmdstat_evalsha", "cmdstat_eval")
        return int(sum(one["calls"] for name, one in stats.items() if name not in around))

    before = count()
    return await work, count() - before


async def test_an_exchange_that_has_nothing_to_do(own_bus: Bus, client: redis.Redis) -> None:
    engine = await own_bus.engine()
    await take(engine)
    _, count = await commands(client, take(engine, tokens=0))
    assert count <= 9 + OFFER + LEASE + BELLS
    _, count = await commands(client, take(engine, tokens=0))
    assert count <= 8 + LEASE  # known to be full already
    _, count = await commands(client, engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0))
    assert count <= 11 + LEASE  # with tokens for a gateway


async def test_a_claim_in_order(own_bus: Bus, client: redis.Redis) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await take(engine)
    for at in range(QUEUED):
        await gateway.submit(ask(f"r{at}", prompt(at, 70)))
    got, count = await commands(client, take(engine, requests=1))
    assert ids(got) == ["r0"]
    assert count <= 27 + OFFER + CLAIM + LEASE + BELLS + WAKE
    for at in range(1, 4):  # ends one and claims one
        got, count = await commands(
            client, engine.sync([], [f"r{at - 1}"], load("e1"), 1_000_000, 1, claim_tokens=1_000_000)
        )
        assert ids(got) == [f"r{at}"]
        assert count <= 36 + OFFER + CLAIM + LEASE + BELLS + WAKE
    got, count = await commands(client, take(engine, requests=10))
    assert len(ids(got)) == 10
    assert count <= 179 + OFFER + 10 * CLAIM + LEASE + BELLS + WAKE


async def test_a_claim_while_both_lanes_wait(own_bus: Bus, client: redis.Redis) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await take(engine)
    for at in range(100):
        await gateway.submit(generate(f"on {at}", tenant=f"t{at % 5}"))
        await gateway.submit(generate(f"late {at}", tenant=f"t{at % 5}"), bounds=LATE)
    got, count = await commands(client, take(engine, requests=10))
    assert len(ids(got)) == 10
    assert count <= 246 + OFFER + 10 * CLAIM + LEASE + BELLS + WAKE


async def test_a_claim_by_prefix(own_bus: Bus, client: redis.Redis) -> None:
    """The other engine is full."""
    gateway, engine, other = await own_bus.gateway(), await own_bus.engine("e1"), await own_bus.engine("e2")
    await engine.sync([], [], load("e1"), 0, 0, SLOW)
    await other.sync([], [], load("e2"), 0, 0, SLOW)
    for at in range(QUEUED):
        await gateway.submit(ask(f"r{at}", prompt(at % 50, 1100, own=76)))
    done: list[str] = []
    for _ in range(100):
        got, count = await commands(
            client, engine.sync([], done, load("e1"), 1_000_000, 1, SLOW, claim_tokens=1_000_000)
        )
        done = ids(got)
        assert len(done) == 1
        assert count <= 54 + OFFER + CLAIM + LEASE + BELLS + WAKE


@contextlib.contextmanager
def tenants_read(client: redis.Redis, waiting: int) -> Iterator[list[int]]:
    """Count how many tenants scripts ask of `turns:` in each command; `waiting`: as many as there are."""
    found: list[int] = []
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        yield found
        client.echo("end")
        while not (command := monitor.next_command()["command"]).startswith("ECHO"):
            if match := re.search(r"zrange \S*:turns:\S+ (\d+) (-?\d+)", command, re.IGNORECASE):
                first, last = int(match[1]), int(match[2])
                found.append(min(waiting, last + 1 if last >= 0 else waiting) - first)


async def test_requests_of_many_tenants_that_are_left_to_another_engine(own_bus: Bus, client: redis.Redis) -> None:
    """What one sync tries is bounded, and it goes through the tenants once."""
    gateway, engine, other = await own_bus.gateway(), await own_bus.engine("e1"), await own_bus.engine("e2")
    await engine.sync([], [], load("e1"), 0, 0, SLOW)
    busy = PrefixReport(token_us=1e6, step_us=10_000.0, backlog=1_000_000)
    waiting = 0
    for more in (2 * TRIES, TRIES):
        for at in range(waiting, waiting + more):
            await gateway.submit(ask(f"r{at}", prompt(1, 100), tenant=f"t{at}"))
        waiting += more
        await other.sync([], [], load("e2"), *PLENTY, SLOW, claim_tokens=0)  # it has free capacity, and claims nothing
        with tenants_read(client, waiting) as read:
            got, count = await commands(client, engine.sync([], [], load("e1"), 1_000_000, 2, busy))
        assert len(ids(got)) == 2
        assert sum(read) <= 2 * TRIES + 4
        assert count <= 11 * TRIES


async def test_claims_outside_a_crowd_go_through_the_tenants_once(own_bus: Bus, client: redis.Redis) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    crowd = [f"loud {at}" for at in range(100)]
    for tenant in crowd:
        await gateway.submit(generate(tenant, tenant=tenant))
    for at in range(20):
        await gateway.submit(generate(f"quiet {at:02}", tenant=f"quiet {at:02}"))
    full = msgspec.structs.replace(load("e1"), over_share=crowd, preemptible_tokens=1000)
    with tenants_read(client, 120) as read:
        got, count = await commands(client, engine.sync([], [], full, 0, 0))
    assert ids(got) == [f"quiet {at:02}" for at in range(20)]
    assert sum(read) <= 2 * (len(crowd) + 1) + 20  # tenants read in both lanes
    assert count <= 9 + OFFER + 20 * 24  # a sync, and each claim; Redis 6.2 counts four commands more than 7.0


async def test_output_of_many_sequences_takes_no_more_commands_than_that_of_one(
    own_bus: Bus, client: redis.Redis
) -> None:
    """But for the ledger of each tenant, and the logs, which are entered once in TAIL syncs."""
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    names = [f"r{at}" for at in range(64)]
    for name in names:
        await gateway.submit(generate(name))
    assert len(ids(await take(engine))) == 64
    step = TokenBatch("e1", [Delta(name, 0, [1]) for name in names])
    _, count = await commands(client, engine.sync([("g1", step)], [], load("e1"), 0, 0))
    assert count <= 17 + OFFER + LEASE + BELLS
    last = TokenBatch("e1", [Delta(name, 1, [2], Finish("stop")) for name in names])
    _, count = await commands(client, engine.sync([("g1", last)], names, load("e1"), 0, 0))
    assert count <= 16 + 17 * 64
