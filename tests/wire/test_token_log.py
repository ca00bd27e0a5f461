"""The token log: what a client may have seen survives engine and gateway, and only one engine may append to it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import token_log
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.layout import OUTPUT_COST, TAIL, TAIL_BYTES
from quire.engine.wire.messages import Beams, Delta, Finish, Sampling, TokenBatch, TokenLogprob
from quire.engine.wire.quotas import Quota
from quire.engine.wire.records import Attached, DuplicateRequest, IdempotencyKey, QueueBounds, Usage
from quire.engine.wire.token_log import LoggedOutput
from tests.pace import Patience, paced
from tests.wire.sides import PLENTY, Bus, batch, generate, ids, load, read, read_deltas, take, within

pytestmark = pytest.mark.every_redis
ROOT = Path(__file__).resolve().parents[2]


async def say(engine: EngineSide, *deltas: Delta, name: str = "e1", finished: tuple[str, ...] = ()) -> Any:
    return await engine.sync([("g1", TokenBatch(name, list(deltas)))], list(finished), load(name), 0, 0)


async def die(bus: Bus, name: str = "e1") -> None:
    """The engine's lease lapses."""
    with redis.Redis.from_url(bus.url) as client:
        client.delete(f"{{{bus.namespace}}}:lease:{name}")


def test_what_goes_in_comes_out() -> None:
    probs = [TokenLogprob(-0.5, [(5, -0.5)]), TokenLogprob(-1.0), TokenLogprob(-2.0)]
    deltas = [
        Delta("a:b", 0, [2**32 - 1], None, 1, probs[:1], 16, probs[:2]),
        Delta("a:b", 1, [0, 7], Finish("stop", 7), 1, probs[1:]),
    ]
    journal = token_log.Journal()
    journal.hold("a:b", [0, 0])
    batches = [("g", TokenBatch("e", deltas))]
    journal.add(batches, [])
    logged = journal.due(batches)
    assert logged.segments == ["a:b", 1, 0, 3]
    fields = {field: value for _, field, value in logged.extras}
    assert fields.keys() == {"head:1", "finish:1", "logprobs 1 0"}
    framed, values = fields["logprobs 1 0"], []
    while framed:
        size = 4 + int.from_bytes(framed[:4], "little")
        values.append(framed[4:size])
        framed = framed[size:]
    said = token_log.read(logged.tokens, fields["finish:1"], fields["head:1"], values)
    assert said == LoggedOutput([2**32 - 1, 0, 7], Finish("stop", 7), probs, 16, probs[:2])
    assert token_log.read(None, None) == LoggedOutput([])


@pytest.mark.parametrize("alternatives", [0, 20, 128])
def test_log_probabilities_take_what_the_docs_say(alternatives: int) -> None:
    """With the largest ids that a vocabulary has, so at most that."""
    text = " ".join((ROOT / "docs" / "api.md").read_text(encoding="utf-8").split())
    found = re.search(r"it keeps (\d+) bytes (?:a|per) token, and up to (\d+) for each alternative", text)
    assert found is not None
    head, each = map(int, found.groups())
    top = [(2**31 + one, -1 / (one + 3)) for one in range(alternatives)]
    journal = token_log.Journal()
    journal.hold("a", [0])
    batches = [("g", TokenBatch("e", [Delta("a", 0, [1], logprobs=[TokenLogprob(-1 / 3, top)])]))]
    journal.add(batches, [])
    [(_, _, framed)] = journal.due(batches).extras
    assert head + (each - 1) * alternatives <= len(framed) - 4 <= head + each * alternatives + 2  # 2: a longer head


async def test_another_engine_gets_the_tokens_so_far(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    await gateway.submit(generate("a", n=3), record=b"body")
    await gateway.submit(generate("b"))
    assert (await take(dying)).resumed == {}
    await say(dying, *(Delta("a", 0, [10 + i], index=i) for i in range(3)))
    await say(dying, Delta("a", 1, [20]), Delta("a", 2, [30]), Delta("a", 1, [21], Finish("stop", 21), 1))
    await die(bus)
    await gateway.fleet()
    claimed = await take(other, "e2")
    assert ids(claimed) == ["a", "b"]
    so_far = [LoggedOutput([10, 20, 30]), LoggedOutput([11, 21], Finish("stop", 21)), LoggedOutput([12])]
    assert claimed.resumed == {"a": so_far}
    await say(other, Delta("a", 3, [40], Finish("length")), Delta("a", 1, [22], Finish("length"), 2), finished=("a",))
    so_far[0], so_far[2] = LoggedOutput([10, 20, 30, 40], Finish("length")), LoggedOutput([12, 22], Finish("length"))
    assert await gateway.attach("a") == Attached(b"body", so_far)  # over, and still there to be read
    assert await gateway.log("a", 0, 3, 9) == LoggedOutput([40], Finish("length"))
    assert await gateway.log("a", 3, 0, 9) is None
    assert await gateway.attach("never heard of") is None


async def test_an_attached_gateway_misses_nothing(bus: Bus) -> None:
    first, second, engine = await bus.gateway("g1"), await bus.gateway("g2"), await bus.engine()
    await first.submit(generate("a", n=2, sampling=Sampling(logprobs=0)), record=b"r")
    assert (await second.attach("a")) == Attached(b"r", [LoggedOutput([]), LoggedOutput([])])  # while it waits
    await take(engine)
    probs = [TokenLogprob(-1.0)]
    await say(engine, Delta("a", 0, [1], None, 0, probs, 8), Delta("a", 0, [2], None, 1, probs))
    [batch] = await read(second, 1)
    assert [delta.token_ids for delta in batch.deltas] == [[1], [2]]

    third = await bus.gateway("g3")  # while it runs
    assert (await third.attach("a")) == Attached(
        b"r", [LoggedOutput([1], None, probs, 8), LoggedOutput([2], None, probs)]
    )
    # In the sync that brings the engine the news, tokens go past the third: it hears how far they went.
    await say(engine, Delta("a", 1, [3], Finish("length"), 0, probs), Delta("a", 1, [4], None, 1, probs))
    await say(engine, Delta("a", 2, [5], Finish("length"), 1, probs), finished=("a",))
    missed, after = await read(third, 2)
    assert missed.deltas == [Delta("a", 2, [], Finish("length"), 0), Delta("a", 2, [], None, 1)]
    assert await third.log("a", 1, 1, 9) == LoggedOutput([4, 5], Finish("length"), probs * 2)
    assert after.deltas == [Delta("a", 2, [5], Finish("length"), 1, probs)]


async def test_listeners_outlive_the_engine(bus: Bus) -> None:
    gateways = [await bus.gateway(f"g{i}") for i in (1, 2)]
    dying, other = await bus.engine("e1"), await bus.engine("e2")
    await gateways[0].submit(generate("a"))
    await take(dying)
    await gateways[1].attach("a")
    await die(bus)
    await gateways[0].fleet()
    assert ids(await take(other, "e2")) == ["a"]
    await say(other, Delta("a", 0, [1]), name="e2")
    for gateway in gateways:
        [batch] = await read(gateway, 1)
        assert batch.deltas == [Delta("a", 0, [1])]


async def test_who_leaves_takes_nobody_along(bus: Bus) -> None:
    first, second, engine = await bus.gateway("g1"), await bus.gateway("g2"), await bus.engine()
    await first.submit(generate("a"))
    await take(engine)
    await second.attach("a")
    await take(engine)
    await first.cancel("a")
    assert (await take(engine)).aborts == []
    await say(engine, Delta("a", 0, [1]))
    # After two words on where the log ends, one for each change of who listens.
    assert [batch.deltas[0].token_ids for batch in await read(second, 3)] == [[], [], [1]]
    await second.cancel("a")
    assert [abort.id for abort in (await take(engine)).aborts] == ["a"]
    assert (await second.attach("a")) == Attached(b"", [LoggedOutput([1], Finish("cancelled"))])


async def test_an_idempotency_key_is_spent_once(bus: Bus) -> None:
    gateway, other = await bus.gateway("g1"), await bus.gateway("g2")
    once = IdempotencyKey("key", "body")
    assert await gateway.find_duplicate(once) is None
    assert (await gateway.submit(generate("a"), generate("b"), idempotency_key=once)).accepted
    again = await other.submit(generate("c", gateway="g2"), idempotency_key=once)
    assert (again.accepted, again.duplicate, again.queued) == (False, DuplicateRequest("a", same_body=True), 2)
    assert await other.find_duplicate(IdempotencyKey("key", "another body")) == DuplicateRequest("a", same_body=False)
    assert (await gateway.submit(generate("a"), generate("b"), idempotency_key=once)).accepted  # a retry of our own
    key = IdempotencyKey("key 2", "")
    full = await other.submit(generate("d", gateway="g2"), idempotency_key=key, bounds=within(0))
    assert not full.accepted
    assert await gateway.find_duplicate(IdempotencyKey("key 2", "")) is None  # what was refused holds no key


async def test_a_log_leaves_when_it_is_due(redis_server: EmbeddedRedis, bus: Bus, namespace: str) -> None:
    gateway, engine = await bus.gateway("g1", retain_s=paced(0.3)), await bus.engine()
    await gateway.submit(generate("a", n=2), record=b"x" * 1000, idempotency_key=IdempotencyKey("k", "b"))
    await take(engine)
    probs = [TokenLogprob(-1.0)]
    await say(engine, Delta("a", 0, [1], None, 0, probs, 3), Delta("a", 0, [2], None, 1))
    await say(engine, Delta("a", 1, [1], Finish("length")), Delta("a", 1, [2], Finish("length"), 1), finished=("a",))
    assert await gateway.attach("a") is not None
    bound = Patience(100)
    while await gateway.attach("a") is not None:
        assert bound.lasts()
        await asyncio.sleep(0.02)
    assert await gateway.find_duplicate(IdempotencyKey("k", "b")) is None
    await say(engine, Delta("a", 2, [3], Finish("length")))  # too late, and it leaves no trace
    with redis.Redis.from_url(redis_server.url) as client:
        assert list(client.scan_iter(f"{{{namespace}}}:log:*")) == []
        assert list(client.scan_iter(f"{{{namespace}}}:once:*")) == []


async def test_a_token_costs_redis_a_few_bytes(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    await take(engine)
    for at in range(500):
        await say(engine, Delta("a", at, [100_000 + at]))
    with redis.Redis.from_url(redis_server.url) as client:
        tokens = client.memory_usage(f"{{{bus.namespace}}}:log:a:0")
        rest = client.memory_usage(f"{{{bus.namespace}}}:log:a")
    print(f"{tokens} bytes for 500 tokens, and {rest} for the rest of the log")
    assert tokens <= 500 * 2 * token_log.TOKEN_BYTES + 200  # growing strings have reserved memory
    assert rest <= 300


async def test_a_zombie_cannot_write(bus: Bus) -> None:
    """Its lease lapsed while it stood still, and another engine has gone on: all it says of that is dropped."""
    gateway, zombie, other = await bus.gateway(), await bus.engine("e1"), await bus.engine("e2")
    for name in "ab":
        await gateway.submit(generate(name))
    await take(zombie)
    await say(zombie, Delta("a", 0, [1]), Delta("b", 0, [1]))
    await die(bus)
    await gateway.fleet()
    assert ids(await take(other, "e2", requests=1)) == ["a"]
    await say(other, Delta("a", 1, [2]), name="e2")
    back = await zombie.sync(
        [("g1", TokenBatch("e1", [Delta("a", 1, [9], Finish("length")), Delta("b", 1, [2])]))],
        ["a"],
        load("e1"),
        *PLENTY,
    )
    assert (back.reassigned, back.generates) == (["a"], [])
    await say(other, Delta("a", 2, [3], Finish("length")), name="e2", finished=("a",))
    assert [one.token_ids for one in (await gateway.attach("a")).choices] == [[1, 2, 3]]  # type: ignore[union-attr]
    assert [one.token_ids for one in (await gateway.attach("b")).choices] == [[1, 2]]  # type: ignore[union-attr]
    got = [delta for batch in await read(gateway, 4) for delta in batch.deltas if delta.id == "a"]
    assert [delta.token_ids for delta in got] == [[1], [2], [3]]


@pytest.mark.parametrize("returns", [False, True])
async def test_requests_of_a_dead_gateway_wait_for_somebody_to_attach(bus: Bus, returns: bool) -> None:
    engine = await bus.engine()
    dead = await bus.gateway("g1")
    await dead.submit(generate("a"), record=b"r")
    await dead.fleet()
    await take(engine)
    other = await bus.gateway("g2", grace_s=60.0 if returns else 0.0)
    with redis.Redis.from_url(bus.url) as client:
        client.delete(f"{{{bus.namespace}}}:gateway:g1")  # its heart stops
    await other.fleet()
    if returns:
        assert await other.attach("a") == Attached(b"r", [LoggedOutput([])])
        await take(engine)
        await say(engine, Delta("a", 0, [1]))
        assert (await read(other, 2))[1].deltas == [Delta("a", 0, [1])]
        await say(engine, Delta("a", 1, [2], Finish("length")), finished=("a",))
        await dead.submit(generate("b"))
        await dead.cancel_for_all(["b"])  # what comes next on its channel
        assert [delta.id for delta in await read_deltas(dead, 1)] == ["b"]  # nothing was sent to the dead
    else:
        await asyncio.sleep(0.002)
        await other.fleet()
        assert [abort.id for abort in (await take(engine)).aborts] == ["a"]


async def test_a_log_is_read_in_parts_of_any_size(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a", sampling=Sampling(logprobs=1)))
    await take(engine)
    tokens = list(range(100, 140))
    probs = [TokenLogprob(-float(token), [(token, -1.0)]) for token in tokens]
    at = 0
    for cut in (1, 20, 2, 17):  # frames of one byte's array header, and of three
        finish = Finish("length") if at + cut == len(tokens) else None
        await say(engine, Delta("a", at, tokens[at : at + cut], finish, 0, probs[at : at + cut], 16 if at == 0 else 0))
        at += cut
    for first in range(len(tokens)):
        for count in (1, 3, 25, 100):
            end = min(first + count, len(tokens))
            finish = Finish("length") if end == len(tokens) else None
            assert await gateway.log("a", 0, first, count) == LoggedOutput(
                tokens[first:end], finish, probs[first:end], 16
            )


async def test_each_token_delivered_is_counted_once_and_each_generated(bus: Bus) -> None:
    first, second, engine = await bus.gateway("g1"), await bus.gateway("g2"), await bus.engine()
    await first.submit(generate("a", n=2, tenant="t"), generate("b", tenant="t"))
    await take(engine)
    await say(engine, Delta("a", 0, [1, 2, 3]), Delta("a", 0, [4, 5, 6], index=1), Delta("b", 0, [7]))
    assert await first.settle([("a", "t", [2, 0]), ("b", "t", [1])]) == [
        Usage("a", "t", 6, 2, 2),
        Usage("b", "t", 1, 1, 1),
    ]
    assert await second.settle([("a", "t", [1, 3])]) == [Usage("a", "t", 6, 5, 3)]  # a client that went on elsewhere
    assert await second.settle([("a", "t", [1, 3])]) == [Usage("a", "t", 6, 5, 0)]  # a repeated one
    with redis.Redis.from_url(bus.url, decode_responses=True) as client:
        usage = client.hgetall(f"{{{bus.namespace}}}:usage:t")
    assert usage == {"requests": "2", "prompt_tokens": "20", "generated": "7", "delivered": "6"}


@pytest.mark.parametrize("what", ["settle", "attach", "quota"])
async def test_an_ended_request_costs_no_other_request_anything(bus: Bus, what: str) -> None:
    """Its log is complete.  So neither its settlement nor a reader decodes what engines must still enter for others."""
    gateway, engine, other = await bus.gateway(), await bus.engine(), await bus.engine("e2")
    quota = Quota(max_requests=1)
    await gateway.quotas.take("t", quota, "a", generate("a").deadline_ms, [(10, 5)])
    await gateway.submit(generate("a.0", tenant="t"))
    await take(engine)
    await gateway.submit(generate("b"))
    await take(other, "e2")
    await other.sync([("g1", batch("b", 0, "e2"))], [], load("e2"), 0, 0)
    await say(engine, Delta("a.0", 0, [1, 2]))
    await say(engine, Delta("a.0", 2, [3], Finish("length")))
    await engine.sync([], ["a.0"], load("e1"), 0, 0)
    if what == "settle":
        assert await gateway.settle([("a.0", "t", [3])]) == [Usage("a.0", "t", 3, 3, 3)]
    elif what == "attach":
        found = await gateway.attach("a.0")
        assert found is not None
        assert found.choices == [LoggedOutput([1, 2, 3], Finish("length"))]
    else:  # another request takes the place that it still had
        taken = await gateway.quotas.take("t", quota, "c", generate("c").deadline_ms, [(10, 5)])
        assert taken.used_up is None
    with redis.Redis.from_url(bus.url) as client:
        assert client.llen(f"{{{bus.namespace}}}:tail:e2") == 1


@pytest.mark.parametrize("how", ["withdrawn", "for all"])
async def test_what_a_tail_has_of_a_withdrawn_request_counts_and_is_read(bus: Bus, how: str) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a", tenant="t"))
    await take(engine)
    await say(engine, Delta("a", 0, [1, 2, 3]))
    await (gateway.cancel("a") if how == "withdrawn" else gateway.cancel_for_all(["a"]))
    with redis.Redis.from_url(bus.url) as client:
        assert client.strlen(f"{{{bus.namespace}}}:log:a:0") == 0
    found = await gateway.attach("a")
    assert found is not None
    assert found.choices == [LoggedOutput([1, 2, 3], Finish("cancelled"))]
    await say(engine, Delta("a", 3, [4]))
    assert await gateway.settle([("a", "t", [3])]) == [Usage("a", "t", 4, 3, 3)]


async def test_a_beam_search_is_charged_for_all_its_beams(bus: Bus) -> None:
    """Four beams of three tokens; two answers are sent.  A retry of the sync charges nothing twice."""
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a", n=2, tenant="t", beams=Beams(4)), bounds=QueueBounds(extra_tokens=48))
    await take(engine)
    best, second = Finish("length", score=-1.0, searched=6), Finish("length", score=-2.0)
    await say(engine, Delta("a", 0, [1, 2, 3], best), Delta("a", 0, [4, 5, 6], second, 1))
    assert await gateway.settle([("a", "t", [3, 3])]) == [Usage("a", "t", 12, 6, 6)]
    with redis.Redis.from_url(bus.url, decode_responses=True) as client:
        usage = client.hgetall(f"{{{bus.namespace}}}:usage:t")
        counter = float(client.hget(f"{{{bus.namespace}}}:counters", "t") or 0)
    assert usage == {"requests": "1", "prompt_tokens": "10", "generated": "12", "delivered": "6"}
    assert counter == 10 + 48 + OUTPUT_COST * 12
    assert [await gateway.log("a", index, 0, 9) for index in range(2)] == [
        LoggedOutput([1, 2, 3], best),
        LoggedOutput([4, 5, 6], second),
    ]


async def test_a_released_key_is_free_and_a_newer_owner_keeps_it(bus: Bus) -> None:
    gateway = await bus.gateway()
    once = IdempotencyKey("key", "body")
    await gateway.submit(generate("a"), idempotency_key=once)
    await gateway.release(once, "a")
    assert await gateway.find_duplicate(once) is None
    assert (await gateway.submit(generate("b"), idempotency_key=once)).accepted
    await gateway.release(once, "a")
    assert await gateway.find_duplicate(once) == DuplicateRequest("b", True)


async def test_a_gateway_hears_that_it_was_given_up(bus: Bus) -> None:
    gateway = await bus.gateway()
    assert (await gateway.fleet()).forgotten
    assert not (await gateway.fleet()).forgotten
    with redis.Redis.from_url(bus.url) as client:
        client.delete(f"{{{bus.namespace}}}:gateway:g1")
    assert (await gateway.fleet()).forgotten


async def test_a_gateway_hears_that_redis_may_have_lost_the_newest_requests(
    own_server: EmbeddedRedis, own_bus: Bus
) -> None:
    """A failover loses the last acknowledged writes; the heartbeat before them may have survived."""
    gateway = await own_bus.gateway()
    with redis.Redis.from_url(own_server.url) as client:
        assert [(await gateway.fleet()).forgotten for _ in range(2)] == [True, False]
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert not (await gateway.fleet()).forgotten, "a broken connection loses nothing"
        client.replicaof("127.0.0.1", "9")
        meeting = asyncio.create_task(gateway.fleet())
        await asyncio.sleep(0.2)
        client.replicaof("NO", "ONE")
        assert (await meeting).forgotten or (await gateway.fleet()).forgotten
        assert not (await gateway.fleet()).forgotten


async def test_a_log_that_is_still_read_is_kept(bus: Bus) -> None:
    gateway = await bus.gateway(retain_s=30.0)
    await gateway.submit(generate("a"))
    await gateway.cancel("a")
    with redis.Redis.from_url(bus.url) as client:
        key = f"{{{bus.namespace}}}:log:a"
        client.pexpire(key, 5_000)
        await gateway.keep(["a", "unknown"])
        assert client.pttl(key) > 25_000


async def test_who_attaches_while_the_last_tokens_are_under_way_hears_the_end(bus: Bus) -> None:
    """The engine does not know the new listener when it sends them, and forgets the request with them."""
    first, second, engine = await bus.gateway("g1"), await bus.gateway("g2"), await bus.engine()
    await first.submit(generate("a"))
    await take(engine)
    assert await second.attach("a") == Attached(b"", [LoggedOutput([])])
    await say(engine, Delta("a", 0, [1, 2], Finish("length")), finished=("a",))
    [batch] = await read(second, 1)
    assert batch.deltas == [Delta("a", 2, [], Finish("length"))]
    assert await second.log("a", 0, 0, 9) == LoggedOutput([1, 2], Finish("length"))


@pytest.mark.parametrize("gateways", [1, TAIL + 4])
async def test_the_tail_spares_the_logs_however_many_gateways_there_are(bus: Bus, gateways: int) -> None:
    """With a batch for each of many gateways, a sync still enters nothing in the logs until TAIL syncs."""
    engine, names = await bus.engine(), [f"g{at}" for at in range(gateways)]
    for name in names:
        gateway = await bus.gateway(name)
        await gateway.submit(generate(name, gateway=name))
    await take(engine)
    with redis.Redis.from_url(bus.url) as client:
        prefix = f"{{{bus.namespace}}}:"
        lengths = []
        for at in range(2 * TAIL + 4):
            batches = [(name, TokenBatch("e1", [Delta(name, at, [at])])) for name in names]
            await engine.sync(batches, [], load("e1"), 0, 0)
            lengths.append({client.strlen(f"{prefix}log:{name}:0") for name in names})
            assert client.llen(f"{prefix}tail:e1") <= TAIL * gateways
        assert [lengths.index(length) for length in ({4 * (TAIL + 1)}, {8 * (TAIL + 1)})] == [TAIL, 2 * TAIL + 1]
        assert all(length in ({0}, {4 * (TAIL + 1)}, {8 * (TAIL + 1)}) for length in lengths)
    found = await gateway.attach(names[-1])
    assert found is not None
    assert found.choices == [LoggedOutput(list(range(2 * TAIL + 4)))]


async def test_the_tail_is_bounded_by_bytes_as_well(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    await take(engine)
    step = [2**32 - 1] * (TAIL_BYTES // 5 // 4)  # 5 bytes each in a batch: four steps fill the tail
    with redis.Redis.from_url(bus.url) as client:
        for at in range(5):
            assert client.llen(f"{{{bus.namespace}}}:tail:e1") == at
            await say(engine, Delta("a", at * len(step), step))
        assert client.llen(f"{{{bus.namespace}}}:tail:e1") == 0
        assert client.strlen(f"{{{bus.namespace}}}:log:a:0") == 5 * 4 * len(step)
