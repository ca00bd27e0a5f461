"""Quotas in Redis against a plain model: two gateways, one clock that the test sets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import EXPIRY_MS, QUOTA_CHECK_MS, QUOTA_MS, TOMBSTONE_MS
from quire.engine.wire.messages import Generate, Sampling
from quire.engine.wire.quotas import Buckets, Quota, QuotaStore, Taken
from quire.engine.wire.scripts import FLEET, SETTLE, Script
from tests.matrix import examples
from tests.pace import patience

T0 = 1_790_000_000_000  # unix ms at which the clock of a test begins


class Clocked:
    """Runs scripts whose `TIME` is a key that the test sets."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.client, self.prefix = client, f"{{{namespace}}}:"

    def set(self, now_ms: int) -> None:
        self.client.hset(f"{self.prefix}clock", mapping={"s": now_ms // 1000, "us": now_ms % 1000 * 1000})

    def run(self, script: Script, *args: bytes | str | int) -> Any:
        source = script.source.replace("call('TIME')", "call('HMGET', P .. 'clock', 's', 'us')")
        assert source != script.source
        return self.client.eval(source, 1, self.prefix, *args)

    async def __call__(self, script: Script, *args: bytes | str | int) -> Any:
        return self.run(script, *args)


class Request:
    """What the model knows of one taken request."""

    def __init__(self, prompts: list[tuple[int, int]], taken_ms: int, deadline_ms: int) -> None:
        self.prompts, self.taken_ms, self.deadline_ms = prompts, taken_ms, deadline_ms
        self.state = ["taken"] * len(prompts)  # then "open", "ended", "settled"
        self.generated = [0] * len(prompts)
        self.vanished = [False] * len(prompts)  # Redis has lost its log

    def expires(self) -> int:
        return max(self.deadline_ms, self.taken_ms + QUOTA_MS) + EXPIRY_MS

    def open(self, now_ms: int) -> bool:
        if "open" in self.state:
            return True
        return set(self.state) == {"taken"} and now_ms - self.taken_ms <= TOMBSTONE_MS


class Model:
    """Buckets as numbers of used units, and the requests that have not ended."""

    def __init__(self, quota: Quota) -> None:
        self.quota, self.now = quota, T0
        self.used = {"requests": 0.0, "tokens": 0.0}
        self.requests: dict[str, Request] = {}
        self.limits = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute}

    def advance(self, ms: int) -> None:
        self.now += ms
        for bucket, limit in self.limits.items():
            self.used[bucket] = max(0.0, self.used[bucket] - (limit or 0) * ms / QUOTA_MS)

    def waits(self, prompts: list[tuple[int, int]]) -> dict[str, float]:
        """Ms until each bucket has enough, for those that have not."""
        cost = {"requests": 1, "tokens": sum(map(sum, prompts))}
        found = {}
        for bucket, limit in self.limits.items():
            if limit and (missing := (self.used[bucket] + cost[bucket] - limit) * QUOTA_MS / limit) > 1e-3:
                found[bucket] = missing
        return found

    def take(self, name: str, prompts: list[tuple[int, int]], deadline_ms: int) -> None:
        self.requests[name] = Request(prompts, self.now, deadline_ms)
        self._shift("requests", 1)
        self._shift("tokens", sum(map(sum, prompts)))

    def restore(self, name: str) -> None:
        self._shift("requests", -1)
        self._shift("tokens", -sum(map(sum, self.requests.pop(name).prompts)))

    def settle(self, name: str, at: int) -> None:
        request = self.requests[name]
        if request.state[at] == "ended":
            request.state[at] = "settled"
            if not request.vanished[at]:
                self._shift("tokens", request.generated[at] - request.prompts[at][1])
            if set(request.state) == {"settled"}:
                del self.requests[name]

    def settle_what_ended(self) -> None:
        """What a take does when all places seem taken, and a reading of the fleet."""
        for name, request in list(self.requests.items()):
            if not request.open(self.now):
                for at in range(len(request.prompts)):
                    if name in self.requests:  # the last prompt that was not settled may not be the last one
                        self.settle(name, at)
                self.requests.pop(name, None)

    def expire(self) -> None:
        self.requests = {name: one for name, one in self.requests.items() if one.expires() > self.now}

    def _shift(self, bucket: str, units: float) -> None:
        if self.limits[bucket]:
            self.used[bucket] = max(0.0, self.used[bucket] + units)


class QuotaMachine(RuleBasedStateMachine):
    """Requests are taken, queued, ended, settled, given back and forgotten at two gateways, in any order."""

    server: EmbeddedRedis
    runs = 0

    @initialize(
        requests=st.sampled_from([None, 1, 3, 60, 7001]),
        tokens=st.sampled_from([None, 40, 700, 1_000_000]),
        at_once=st.sampled_from([None, 1, 3]),
    )
    def begin(self, requests: int | None, tokens: int | None, at_once: int | None) -> None:
        QuotaMachine.runs += 1
        self.clients = [redis.Redis.from_url(self.server.url) for _ in range(2)]
        self.sides = [Clocked(client, f"quota-{QuotaMachine.runs}") for client in self.clients]
        self.stores = [QuotaStore(side) for side in self.sides]
        self.quota, self.model = Quota(requests, tokens, at_once), Model(Quota(requests, tokens, at_once))
        self.sides[0].set(T0)
        self.names = 0

    def taken(self, where: int, name: str, prompts: list[tuple[int, int]], deadline_ms: int) -> Taken:
        return asyncio.run(self.stores[where].take("acme", self.quota, name, deadline_ms, prompts))

    @rule(
        where=st.integers(0, 1),
        prompts=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=2),
        life=st.sampled_from([1_000, 300_000]),
        twice=st.booleans(),
    )
    def take(self, where: int, prompts: list[tuple[int, int]], life: int, twice: bool) -> None:
        model, name = self.model, f"cmpl-{self.names}"
        self.names += 1
        deadline_ms = model.now + life
        found = self.taken(where, name, prompts, deadline_ms)
        model.expire()
        waits = model.waits(prompts)
        if waits:
            assert found.used_up == max(waits, key=lambda bucket: waits[bucket]) or len(set(waits.values())) == 1
            assert found.wait_ms == pytest.approx(max(waits.values()), abs=0.01)
            return
        if self.quota.max_requests is not None and len(model.requests) >= self.quota.max_requests:
            model.settle_what_ended()
            if len(model.requests) >= self.quota.max_requests:
                assert found.used_up == "concurrent"
                return
        assert found.used_up is None
        model.take(name, prompts, deadline_ms)
        if twice:  # as if the reply had not arrived; the other gateway takes nothing again
            assert self.taken(1 - where, name, prompts, deadline_ms).used_up is None

    @rule(where=st.integers(0, 1), ms=st.integers(0, 90_000), little=st.booleans())
    def advance(self, where: int, ms: int, little: bool) -> None:
        self.model.advance(ms // 200 if little else ms)
        self.sides[where].set(self.model.now)

    def some(self, data: st.DataObject, *states: str) -> tuple[str, int] | None:
        found = [
            (name, at)
            for name, request in self.model.requests.items()
            for at, state in enumerate(request.state)
            if state in states
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def queue(self, data: st.DataObject) -> None:
        if (one := self.some(data, "taken")) and set(self.model.requests[one[0]].state) == {"taken"}:
            request = self.model.requests[one[0]]
            for at in range(len(request.prompts)):
                self.clients[0].hset(f"{self.sides[0].prefix}req:{one[0]}.{at}", "payload", "x")
                self.clients[0].hset(f"{self.sides[0].prefix}log:{one[0]}.{at}", "n", 1)
                request.state[at] = "open"

    @rule(data=st.data(), share=st.floats(0, 1))
    def end(self, data: st.DataObject, share: float) -> None:
        if one := self.some(data, "open"):
            name, at = one
            request, prefix = self.model.requests[name], self.sides[0].prefix
            request.state[at], request.generated[at] = "ended", int(share * (request.prompts[at][1] + 2))
            self.clients[0].append(f"{prefix}log:{name}.{at}:0", b"toke" * request.generated[at])
            self.clients[0].delete(f"{prefix}req:{name}.{at}")
            self.clients[0].hset(f"{prefix}req:{name}.{at}", "gone", 1)

    @rule(data=st.data(), where=st.integers(0, 1), times=st.integers(1, 2))
    def settle(self, data: st.DataObject, where: int, times: int) -> None:
        """An open one is settled too: its gateway hands it over."""
        if one := self.some(data, "open", "ended"):
            for _ in range(times):
                self.sides[where].run(SETTLE, f"{one[0]}.{one[1]}", "acme", 1, 0)
            self.model.settle(*one)

    @rule(data=st.data(), log_too=st.booleans())
    def vanish(self, data: st.DataObject, log_too: bool) -> None:
        """Its keys expire, are evicted, or are lost in a failover; its entries stay."""
        if one := self.some(data, "open", "ended"):
            name, at = one
            request = self.model.requests[name]
            self.model.advance(TOMBSTONE_MS + 1)  # until then it would count as a request that is being submitted
            lost = [f"req:{name}.{at}", *([f"log:{name}.{at}", f"log:{name}.{at}:0"] if log_too else [])]
            self.clients[0].delete(*(self.sides[0].prefix + key for key in lost))
            request.state[at] = "ended"
            request.vanished[at] |= log_too

    @rule(where=st.integers(0, 1))
    def check(self, where: int) -> None:
        """Readings of the fleet settle what is over, once no gateway will."""
        self.model.advance(QUOTA_CHECK_MS)
        self.sides[where].set(self.model.now)
        for name, request in self.model.requests.items():
            ended = [f"req:{name}.{at}" for at, state in enumerate(request.state) if state != "open"]
            self.clients[0].delete(*(self.sides[0].prefix + key for key in ended), "none")  # TOMBSTONE_MS are over
        self.sides[where].run(FLEET, f"g{where}", 0, 1, "", 0)
        self.model.settle_what_ended()
        prefix = self.sides[0].prefix
        found = self.clients[0].zrange(f"{prefix}quota_open:acme", 0, -1)
        assert set(found) == {name.encode() for name in self.model.requests}
        entries = sum(1 + (state != "settled") for one in self.model.requests.values() for state in one.state)
        assert self.clients[0].hlen(f"{prefix}quota_held:acme") <= entries

    @rule(data=st.data(), where=st.integers(0, 1), times=st.integers(1, 2))
    def restore(self, data: st.DataObject, where: int, times: int) -> None:
        if (one := self.some(data, "taken")) and set(self.model.requests[one[0]].state) == {"taken"}:
            for _ in range(times):
                asyncio.run(self.stores[where].restore("acme", self.quota, one[0]))
            self.model.restore(one[0])

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def both_gateways_see_the_model(self) -> None:
        for store in self.stores:
            found = asyncio.run(store.look("acme", self.quota))
            for bucket, limit in self.model.limits.items():
                debt = self.model.used[bucket] * QUOTA_MS / limit if limit else 0.0
                assert getattr(found, f"{bucket}_ms") == pytest.approx(debt, abs=0.01)
                left = max(0, int((limit or 0) - self.model.used[bucket] + 1e-2))
                assert getattr(found, bucket) in (left, left - 1) if limit else getattr(found, bucket) == 0

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        # Every entry goes with its request, at the latest after its deadline.
        self.model.advance(2 * 300_000 + EXPIRY_MS)
        self.sides[0].set(self.model.now)
        self.taken(0, "last", [(1, 1)], self.model.now)
        prefix = self.sides[0].prefix
        assert self.clients[0].zrange(f"{prefix}quota_open:acme", 0, -1) == [b"last"]
        assert set(self.clients[0].hkeys(f"{prefix}quota_held:acme")) == {b"last", b"last.0"}
        for client in self.clients:
            client.close()


def test_the_script_agrees_with_the_model(redis_server: EmbeddedRedis) -> None:
    QuotaMachine.server = redis_server
    QuotaMachine.TestCase.settings = settings(
        max_examples=examples(100), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case = QuotaMachine.TestCase("runTest")
    case.runTest()


async def test_what_a_killed_gateway_took_comes_back_with_time(redis_server: EmbeddedRedis, namespace: str) -> None:
    """It died between take and submit: its place is free TOMBSTONE_MS later, its tokens within a minute."""
    with redis.Redis.from_url(redis_server.url) as client:
        side, quota = Clocked(client, namespace), Quota(60, 100, 1)
        side.set(T0)
        store = QuotaStore(side)
        assert (await store.take("acme", quota, "a", T0 + 5_000, [(10, 90)])).used_up is None
        side.set(T0 + TOMBSTONE_MS)
        assert (await store.take("acme", quota, "b", T0 + 50_000, [(1, 1)])).used_up == "concurrent"
        side.set(T0 + TOMBSTONE_MS + 1)
        taken = await store.take("acme", quota, "b", T0 + 50_000, [(1, 1)])
        assert taken.used_up is None
        assert taken.buckets.tokens == 100 - 100 + 16 - 2
        side.set(T0 + QUOTA_MS + 1_200)
        assert (await store.look("acme", quota)).tokens == 100


async def test_a_killed_gateway_holds_a_place_only_as_long_as_its_request_lives(
    redis_server: EmbeddedRedis, namespace: str
) -> None:
    """Another gateway counts its request while it waits in the queue, and not once it was withdrawn."""
    quota = Quota(max_requests=1)
    killed = GatewaySide(redis_server.url, "g0", namespace=namespace, grace_s=0.0)
    other = GatewaySide(redis_server.url, "g1", namespace=namespace, grace_s=0.0)
    again = GatewaySide(redis_server.url, "g0", namespace=namespace, grace_s=0.0)
    try:
        await killed.open()
        await other.open()
        far_ms = (await other.fleet()).time_ms + 3_600_000
        assert (await killed.quotas.take("acme", quota, "cmpl-a", far_ms, [(3, 5)])).used_up is None
        assert (
            await killed.submit(Generate("cmpl-a.0", "g0", [1, 2, 3], 5, Sampling(), far_ms, tenant="acme"))
        ).accepted
        assert (await other.quotas.take("acme", quota, "cmpl-b", far_ms, [(3, 5)])).used_up == "concurrent"
        await again.open()  # the supervisor restarts it: its requests have no listener
        until = time.monotonic() + patience(100)
        while (await other.quotas.take("acme", quota, "cmpl-b", far_ms, [(3, 5)])).used_up is not None:
            assert time.monotonic() < until
            await other.fleet()
        assert (await killed.quotas.take("acme", quota, "cmpl-c", far_ms, [(3, 5)])).used_up == "concurrent"
        await killed.quotas.restore("acme", quota, "cmpl-b")
        assert (await killed.quotas.take("acme", quota, "cmpl-c", far_ms, [(3, 5)])).used_up is None
    finally:
        for side in (killed, other, again):
            await side.close()


@pytest.mark.parametrize("lost", ["expired", "evicted with its log", "its end", "a failed submit"])
async def test_what_no_gateway_settles_is_released_by_a_reading_of_the_fleet(
    redis_server: EmbeddedRedis, namespace: str, lost: str
) -> None:
    """Its gateway settled it while it ran, and later its keys are gone; or it never had keys.  Released once."""
    quota = Quota(60, 1000, 5)
    with redis.Redis.from_url(redis_server.url) as client:
        side, name = Clocked(client, namespace), "msg_a"
        side.set(T0)
        store = QuotaStore(side)
        assert (await store.take("acme", quota, name, T0 + 600_000, [(10, 900)])).used_up is None
        if lost != "a failed submit":
            client.hset(f"{side.prefix}req:{name}.0", "payload", "x")
            client.hset(f"{side.prefix}log:{name}.0", "n", 1)
            side.run(SETTLE, f"{name}.0", "acme", 1, 0)
            side.set(T0 + QUOTA_CHECK_MS)
            side.run(FLEET, "g0", 0, 1, "", 0)  # it runs: nothing is released
            assert client.hlen(f"{side.prefix}quota_held:acme") == 2
            client.delete(f"{side.prefix}req:{name}.0")
            if lost == "evicted with its log":
                client.delete(f"{side.prefix}log:{name}.0")
            if lost == "its end":
                client.append(f"{side.prefix}log:{name}.0:0", b"toke" * 900)  # all of it was generated
        side.set(T0 + 2 * QUOTA_CHECK_MS)
        before = (await store.look("acme", quota)).tokens
        for _ in range(3):
            side.run(FLEET, "g0", 0, 1, "", 0)
            side.run(SETTLE, f"{name}.0", "acme", 1, 0)
        assert not client.keys(f"{side.prefix}quota_*")
        assert (await store.look("acme", quota)).tokens == (1000 if lost == "expired" else before)


async def test_the_keys_of_a_tenant_go_away_by_themselves(redis_server: EmbeddedRedis, namespace: str) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        side, quota = Clocked(client, namespace), Quota(60, 100, 1)
        side.set(T0)
        await QuotaStore(side).take("acme", quota, "a", T0 + 5_000, [(10, 90)])
        for key in ("quota:acme", "quota_held:acme", "quota_open:acme"):
            assert 0 < client.pttl(side.prefix + key) <= QUOTA_MS + EXPIRY_MS
        await QuotaStore(side).take("acme", quota, "b", T0 + 5_000, [(10, 90)])  # refused: nothing is written
        assert client.hlen(f"{side.prefix}quota_held:acme") == 2


def test_what_is_left_is_not_rounded_down_by_doubles() -> None:
    for limit in (3, 7, 60, 999, 7001):
        for used in range(0, limit, max(1, limit // 50)):
            buckets = Buckets(Quota(limit), used * QUOTA_MS / limit, 0.0)
            assert buckets.requests == limit - used
