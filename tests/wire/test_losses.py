"""Redis loses acknowledged data: a truncated append-only file, a failover to a replica that lagged behind.

No token may shift, repeat or be missing: the log has each at its position, whichever engine computes it in the end."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import TAIL
from quire.engine.wire.messages import Delta, Finish, Sampling, TokenBatch, TokenLogprob
from quire.engine.wire.records import SyncReply
from quire.engine.wire.token_log import LoggedOutput
from tests.matrix import examples
from tests.pace import patience
from tests.wire.sides import LONG_MS, PLENTY, Bus, generate, ids, load, read

LENGTH = 100  # tokens of an answer
ENGINES = ("e0", "e1")


def token(request_id: str, index: int, position: int) -> int:
    """The token at a position, whichever engine computes it."""
    return zlib.crc32(f"{request_id} {index} {position}".encode())


def logprob(request_id: str, index: int, position: int) -> TokenLogprob:
    return TokenLogprob(-float(position), [(token(request_id, index, position), -float(position))])


class Computing:
    """An engine that emits `token` and `logprob` up to a chosen position."""

    def __init__(self, side: EngineSide, name: str) -> None:
        self.side, self.name = side, name
        self.at: dict[str, list[int]] = {}  # what it holds -> output positions; LENGTH: over

    def piece(self, request_id: str, index: int, count: int) -> Delta:
        first = self.at[request_id][index]
        end = self.at[request_id][index] = min(first + count, LENGTH)
        probs = None
        if request_id.startswith("p"):
            probs = [logprob(request_id, index, at) for at in range(first, end)]
        tokens = [token(request_id, index, at) for at in range(first, end)]
        return Delta(request_id, first, tokens, Finish("length") if end == LENGTH else None, index, probs, 7)

    async def sync(self, pieces: list[tuple[str, int, int]], requests: int = 1000) -> SyncReply:
        """(request, choice, tokens): nothing of those that are over."""
        deltas = [self.piece(*one) for one in pieces if self.at[one[0]][one[1]] < LENGTH]
        finished = [name for name, at in self.at.items() if min(at) == LENGTH]
        batches = [("g", TokenBatch(self.name, deltas))] if deltas else []
        claimed = await self.side.sync(batches, finished, load(self.name), PLENTY[0], requests)
        for name in [*finished, *claimed.reassigned]:
            self.at.pop(name, None)
        for request in claimed.generates:
            so_far = claimed.resumed.get(request.id, [LoggedOutput([])] * request.n)
            for index, said in enumerate(so_far):
                check(request.id, index, said, logprobs=False)
            self.at[request.id] = [LENGTH if said.finish else len(said.token_ids) for said in so_far]
        return claimed

    async def say(self, count: int = 1, requests: int = 1000) -> SyncReply:
        pieces = [(name, index, count) for name, at in self.at.items() for index in range(len(at))]
        return await self.sync(pieces, requests)


def check(request_id: str, index: int, said: LoggedOutput, *, logprobs: bool = True) -> None:
    positions = range(len(said.token_ids))
    assert said.token_ids == [token(request_id, index, at) for at in positions]
    if logprobs and request_id.startswith("p"):
        assert (said.logprobs or []) == [logprob(request_id, index, at) for at in positions]
    if logprobs and said.token_ids:
        assert said.cached_tokens == 7
    if said.finish is not None and said.finish.reason != "error":  # quarantined
        assert (said.finish, len(said.token_ids)) == (Finish("length"), LENGTH)


async def logged(gateway: GatewaySide, request_id: str) -> list[LoggedOutput]:
    found = await gateway.attach(request_id, listen=False)
    assert found is not None
    for index, said in enumerate(found.choices):
        check(request_id, index, said)
    return found.choices


@pytest.mark.parametrize("lost", [1, TAIL - 1, TAIL + 5])
@pytest.mark.every_redis
@pytest.mark.parametrize("name", ["a", "p"])  # without logprobs, and with them
async def test_a_log_that_lost_its_end_is_mended(bus: Bus, name: str, lost: int) -> None:
    gateway, engine = await bus.gateway("g"), Computing(await bus.engine("e0"), "e0")
    await gateway.submit(generate(name, gateway="g", sampling=Sampling(logprobs=1)))
    await engine.say()
    for _ in range(TAIL + 6):
        await engine.say()
    assert [len(said.token_ids) for said in await logged(gateway, name)] == [TAIL + 6]  # the tail is in the log now
    with redis.Redis.from_url(bus.url) as client:
        key = f"{{{bus.namespace}}}:log:{name}:0"
        whole = client.get(key)
        client.set(key, whole[: -4 * lost])
        if name == "p":
            client.ltrim(f"{key}:logprobs", 0, -lost - 1)
    while engine.at:
        assert (await engine.say()).reassigned == []
    assert [len(said.token_ids) for said in await logged(gateway, name)] == [LENGTH]


@pytest.mark.every_redis
async def test_a_log_that_lost_more_than_its_engine_ever_said_is_computed_again(bus: Bus) -> None:
    gateway, first, second = await bus.gateway("g"), await bus.engine("e0"), await bus.engine("e1")
    await gateway.submit(generate("a", gateway="g"))
    for side, name in ((first, "e0"), (second, "e1")):
        engine = Computing(side, name)
        await engine.say()
        await engine.say(5)
        if name == "e0":
            await side.close()
    with redis.Redis.from_url(bus.url) as client:
        key = f"{{{bus.namespace}}}:log:a:0"
        client.set(key, client.get(key)[:12])
    lost: list[str] = []
    while not lost:  # within TAIL syncs
        lost += (await engine.say()).reassigned
        assert engine.at or lost
    async with asyncio.timeout(patience(100)):
        while (await logged(gateway, "a"))[0].finish is None:
            await engine.say(5)


class Snapshots:
    """What Redis forgets: it goes back to how it was, as a replica that lagged behind has it."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client, self._pattern = client, f"{{{namespace}}}:*"
        self._kept: dict[bytes, tuple[int, Any]] = {}

    def keep(self) -> None:
        self._kept = {
            key: (max(0, self._client.pttl(key)), self._client.dump(key))
            for key in self._client.scan_iter(self._pattern)
        }

    def go_back(self) -> None:
        if keys := list(self._client.scan_iter(self._pattern)):
            self._client.delete(*keys)
        for key, (ttl, value) in self._kept.items():
            self._client.restore(key, ttl, value)


@pytest.mark.every_redis
async def test_a_lost_claim_end_or_token_comes_again(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway, engine = await bus.gateway("g"), Computing(await bus.engine("e0"), "e0")
    await gateway.fleet()
    for name in "abc":
        await gateway.submit(generate(name, gateway="g", n=2))
    assert ids(await engine.sync([], requests=2)) == ["a", "b"]
    await engine.say(3, requests=0)
    with redis.Redis.from_url(redis_server.url) as client:
        past = Snapshots(client, bus.namespace)
        past.keep()
        assert ids(await engine.sync([("a", 0, LENGTH), ("a", 1, LENGTH), ("b", 0, 5)])) == ["c"]
        await engine.sync([])  # and a is forgotten
        assert set(engine.at) == {"b", "c"}
        assert (await gateway.fleet()).forgotten is False
        past.go_back()
    assert (await gateway.fleet()).forgotten
    claimed = await engine.say()
    assert claimed.reassigned == ["c"]  # its claim was, so it waits again
    assert sorted(ids(claimed)) == ["a", "c"]  # a's end was: what the log has not is computed again
    assert {name: engine.at[name] for name in "abc"} == {"a": [3, 3], "b": [9, 4], "c": [0, 0]}
    while engine.at:
        await engine.say(7)
    for name in "abc":
        assert [len(said.token_ids) for said in await logged(gateway, name)] == [LENGTH, LENGTH]
    assert len(await read(gateway, 1)) == 1


@pytest.mark.every_redis
async def test_who_is_taken_over_and_left_again_is_not_taken_back(bus: Bus) -> None:
    """The engine that wakes up does not know the tokens that the other one has emitted."""
    gateway = await bus.gateway("g")
    zombie, other = [Computing(await bus.engine(name), name) for name in ENGINES]
    await gateway.submit(generate("a", gateway="g"))
    await zombie.say()
    await zombie.say(3)
    with redis.Redis.from_url(bus.url) as client:
        client.delete(f"{{{bus.namespace}}}:lease:e0")
    await gateway.fleet()
    await other.say()
    await other.say(4)
    await other.side.close()
    claimed = await zombie.say(2)
    assert claimed.reassigned == ["a"]
    assert ids(claimed) == ["a"]
    assert zombie.at == {"a": [7]}
    while zombie.at:
        await zombie.say(9)
    assert [len(said.token_ids) for said in await logged(gateway, "a")] == [LENGTH]


class Losses(RuleBasedStateMachine):
    """Engines, lapses and a Redis that goes back in time, in any order; then all that it knows of comes to its end."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.namespace = uuid.uuid4().hex
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.gateway = GatewaySide(self.server.url, "g", namespace=self.namespace)
        self.past = Snapshots(self.client, self.namespace)
        self.names: list[str] = []
        self.seen: dict[tuple[str, int], int] = {}  # tokens that clients may have seen of what Redis remembers
        self.remembered: dict[tuple[str, int], int] = {}
        self.run(self.gateway.open())
        self.engines = []
        for name in ENGINES:
            side = EngineSide(self.server.url, name, namespace=self.namespace, lease_ms=LONG_MS)
            self.run(side.open())
            self.engines.append(Computing(side, name))
        self.fresh = False  # no engine has returned to the stored state
        for engine in self.engines:
            self.submit(probs=False, n=2)
            self.run(engine.sync([], 1))

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    @rule(probs=st.booleans(), n=st.integers(1, 2))
    def submit(self, probs: bool, n: int) -> None:
        name = f"{'p' if probs else 'a'}{len(self.names)}"
        self.names.append(name)
        sampling = Sampling(logprobs=1 if probs else -1)
        self.run(self.gateway.submit(generate(name, gateway="g", n=n, sampling=sampling)))

    @rule(which=st.sampled_from((0, 1)), requests=st.integers(0, 3), data=st.data())
    def sync(self, which: int, requests: int, data: st.DataObject) -> None:
        engine = self.engines[which]
        mine = [(name, index) for name, at in engine.at.items() for index in range(len(at))]
        said = st.lists(st.tuples(st.sampled_from(mine), st.integers(1, 12)), unique_by=lambda one: one[0])
        drawn = data.draw(said) if mine else []
        self.talk(engine, [(name, index, count) for (name, index), count in drawn], requests)

    @rule(which=st.sampled_from((0, 1)), steps=st.integers(1, TAIL + 2), count=st.integers(1, 3))
    @precondition(lambda self: any(engine.at for engine in self.engines))
    def go_on(self, which: int, steps: int, count: int) -> None:
        engine = self.engines[which]
        for _ in range(steps):
            self.talk(engine, [(name, index, count) for name, at in engine.at.items() for index in range(len(at))], 1)

    def talk(self, engine: Computing, pieces: list[tuple[str, int, int]], requests: int) -> None:
        before = {name: list(at) for name, at in engine.at.items()}
        claimed = self.run(engine.sync(pieces, requests))
        counts = {(name, index): count for name, index, count in pieces}
        for name, at in before.items():
            for index, position in enumerate(at if name not in claimed.reassigned else ()):
                end = min(position + counts.get((name, index), 0), LENGTH)
                self.seen[name, index] = max(self.seen.get((name, index), 0), end)

    @rule(which=st.sampled_from(ENGINES))
    @precondition(lambda self: any(engine.at for engine in self.engines))
    def lapse(self, which: str) -> None:
        self.client.delete(f"{{{self.namespace}}}:lease:{which}")
        self.run(self.gateway.fleet())

    @rule()
    @precondition(lambda self: not self.fresh and any(engine.at for engine in self.engines))
    def keep(self) -> None:
        self.past.keep()
        self.fresh = True
        self.remembered = dict(self.seen)

    @rule()
    @precondition(lambda self: self.fresh)  # or nothing would ever get far
    def go_back(self) -> None:
        self.past.go_back()
        self.fresh = False
        self.seen = dict(self.remembered)

    @rule(data=st.data())
    @precondition(lambda self: self.names)
    def look(self, data: st.DataObject) -> None:
        name, first = data.draw(st.sampled_from(self.names)), data.draw(st.integers(0, LENGTH))
        if self.run(self.gateway.attach(name, listen=False)) is not None:
            for index, said in enumerate(self.run(logged(self.gateway, name))):
                assert len(said.token_ids) >= self.seen.get((name, index), 0)
            said = self.run(self.gateway.log(name, 0, first, 9))
            assert said.token_ids == [token(name, 0, first + at) for at in range(len(said.token_ids))]

    def teardown(self) -> None:
        for _ in range(20):
            for engine in self.engines:
                self.run(engine.say(LENGTH))
            self.run(self.gateway.fleet())
        assert [engine.at for engine in self.engines] == [{}, {}]
        quarantined = {one.request.id for one in self.run(self.gateway.operations.quarantined())}
        for name in self.names:
            if self.run(self.gateway.attach(name, listen=False)) is not None and name not in quarantined:
                assert all(said.finish == Finish("length") for said in self.run(logged(self.gateway, name)))
        sides: list[Any] = [self.gateway, *(engine.side for engine in self.engines)]
        for side in sides:
            self.run(side.close())
        self.client.close()
        self.runner.close()


@pytest.mark.usefixtures("patient")
def test_whatever_redis_loses_each_token_stands_where_it_belongs(redis_server: EmbeddedRedis) -> None:
    Losses.server = redis_server
    run_state_machine_as_test(
        Losses,
        settings=settings(
            max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
