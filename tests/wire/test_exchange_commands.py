"""How many Redis commands an exchange takes: what it costs Redis, as a number that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
import redis

from engine.common.embedded_redis import EmbeddedRedis
from engine.wire.messages import Delta, Finish, TokenBatch
from tests.wire.sides import LATE, Bus, batch, generate, ids, load, take
from tests.wire.test_locality import SLOW, ask, prompt

QUEUED = 600  # more than Redis keeps as one list


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
    assert count <= 9
    _, count = await commands(client, take(engine, tokens=0))
    assert count <= 8  # known to be full already
    _, count = await commands(client, engine.exchange([("g1", batch("a", 0))], [], load("e1"), 0, 0))
    assert count <= 11  # with tokens for a gateway


async def test_a_claim_in_order(own_bus: Bus, client: redis.Redis) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await take(engine)
    for at in range(QUEUED):
        await gateway.submit(ask(f"r{at}", prompt(at, 70)))
    got, count = await commands(client, take(engine, requests=1))
    assert ids(got) == ["r0"]
    assert count <= 27
    for at in range(1, 4):  # ends one and claims one
        got, count = await commands(
            client, engine.exchange([], [f"r{at - 1}"], load("e1"), 1_000_000, 1, claim_tokens=1_000_000)
        )
        assert ids(got) == [f"r{at}"]
        assert count <= 36
    got, count = await commands(client, take(engine, requests=10))
    assert len(ids(got)) == 10
    assert count <= 179


async def test_a_claim_while_both_lanes_wait(own_bus: Bus, client: redis.Redis) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await take(engine)
    for at in range(100):
        await gateway.submit(generate(f"on {at}", tenant=f"t{at % 5}"))
        await gateway.submit(generate(f"late {at}", tenant=f"t{at % 5}"), bounds=LATE)
    got, count = await commands(client, take(engine, requests=10))
    assert len(ids(got)) == 10
    assert count <= 246


async def test_a_claim_by_prefix(own_bus: Bus, client: redis.Redis) -> None:
    """The other engine is full."""
    gateway, engine, other = await own_bus.gateway(), await own_bus.engine("e1"), await own_bus.engine("e2")
    await engine.exchange([], [], load("e1"), 0, 0, SLOW)
    await other.exchange([], [], load("e2"), 0, 0, SLOW)
    for at in range(QUEUED):
        await gateway.submit(ask(f"r{at}", prompt(at % 50, 1100, own=76)))
    done: list[str] = []
    for _ in range(100):
        got, count = await commands(
            client, engine.exchange([], done, load("e1"), 1_000_000, 1, SLOW, claim_tokens=1_000_000)
        )
        done = ids(got)
        assert len(done) == 1
        assert count <= 54


async def test_output_of_many_sequences_takes_no_more_commands_than_that_of_one(
    own_bus: Bus, client: redis.Redis
) -> None:
    """But for the ledger of each tenant, and the logs, which are entered once in TAIL exchanges."""
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    names = [f"r{at}" for at in range(64)]
    for name in names:
        await gateway.submit(generate(name))
    assert len(ids(await take(engine))) == 64
    step = TokenBatch("e1", [Delta(name, 0, [1]) for name in names])
    _, count = await commands(client, engine.exchange([("g1", step)], [], load("e1"), 0, 0))
    assert count <= 17
    last = TokenBatch("e1", [Delta(name, 1, [2], Finish("stop")) for name in names])
    _, count = await commands(client, engine.exchange([("g1", last)], names, load("e1"), 0, 0))
    assert count <= 16 + 17 * 64
