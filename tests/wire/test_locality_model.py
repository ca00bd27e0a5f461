"""The claim with prefixes in any order of events: each request once, in fairness' order, none left beyond its bound.

The rules are bounds, not a second implementation: they hold for any choice that the script may make within them."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import PLACES, WINDOW
from quire.engine.wire.messages import Generate, Sampling
from quire.engine.wire.prefixes import PrefixReport, prefix_digests, split
from quire.engine.wire.records import LANES, QueueBounds, SyncReply
from tests.matrix import examples
from tests.wire.sides import LATE, LONG_MS, load

ENGINES = ("e0", "e1", "e2")
TENANTS = {"a": 1.0, "b": 2.0}
TARGET_MS = 100_000_000  # passes only where the test says so
STEP_US = (1000.0, 50_000.0)
FAR = 2**60


class LocalityModel(RuleBasedStateMachine):
    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.prefix = f"locality-{uuid.uuid4().hex}"
        self.runner = asyncio.Runner()
        self.client: Any = redis.Redis.from_url(self.server.url, decode_responses=False)
        self.gateway = GatewaySide(self.server.url, "g", namespace=self.prefix)
        self.engines = {
            name: EngineSide(self.server.url, name, namespace=self.prefix, lease_ms=LONG_MS, late_share=0.0)
            for name in ENGINES
        }
        self.requests: dict[str, Generate] = {}
        self.lanes: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.claimed: dict[str, str] = {}
        self.joined: set[str] = set()  # engines that have synced since they opened
        self.lapsed: set[str] = set()  # and those whose lease has lapsed since
        self.run(self.gateway.open())
        for engine in self.engines.values():
            self.run(engine.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def key(self, name: str) -> str:
        return f"{{{self.prefix}}}:{name}"

    def teardown(self) -> None:
        """Whatever happened, the queue empties once time has passed: nothing waits for an engine for ever."""
        try:
            self.empty()
        finally:
            sides: list[Any] = [self.gateway, *self.engines.values()]
            for side in sides:
                self.run(side.close())
            kept = self.client.exists(self.key("spare"), *(self.key(f"prefixes:{name}") for name in ENGINES))
            self.client.close()
            self.runner.close()
        assert not kept

    def empty(self) -> None:
        for _ in range(2 * len(self.waiting) + 2):
            self.older(10_000_000)
            for name in ENGINES:
                self.sync(name, 2**40, 100, 50.0, 10_000.0, 0, [])
        assert not self.waiting
        assert self.claimed.keys() == self.requests.keys()
        assert not self.client.exists(self.key("prefixes"), self.key("passed"))

    # ------------------------------------------------------------------------------------------------------- rules

    @rule(
        prefix=st.integers(0, 3),
        length=st.sampled_from((10, 64, 130, 320, 700)),
        tenant=st.sampled_from(sorted(TENANTS)),
        priority=st.sampled_from((0, 0, 1)),
        late=st.booleans(),
        size_class=st.integers(0, 1),
        digests=st.sampled_from((True, True, True, False)),
    )
    def submit(
        self, prefix: int, length: int, tenant: str, priority: int, late: bool, size_class: int, digests: bool
    ) -> None:
        name, tokens = f"r{len(self.requests):03}", [prefix] * length
        request = Generate(
            name,
            "g",
            tokens,
            1,
            Sampling(),
            int(time.time() * 1000) + 600_000_000,
            priority=priority,
            tenant=tenant,
            weight=TENANTS[tenant],
            prefixes=prefix_digests(tokens, tenant) if digests else b"",
        )
        bounds = LATE if late else QueueBounds(target_ms=TARGET_MS, size_class=size_class)
        assert self.run(self.gateway.submit(request, bounds=bounds)).accepted
        self.requests[name], self.lanes[name] = request, "late" if late else "on_time"
        self.waiting.add(name)

    @rule(ms=st.sampled_from((10, 1000, 100_000)))
    def older(self, ms: int) -> None:
        """Time passes: every request was passed over earlier than it seemed."""
        passed = self.client.hgetall(self.key("passed"))
        for name, value in passed.items():
            until, since = map(int, value.split())
            self.client.hset(self.key("passed"), name, b"%d %d" % (until - ms, since - ms))

    @rule(name=st.sampled_from(ENGINES), prefix=st.integers(0, 3), tenant=st.sampled_from(sorted(TENANTS)))
    def evict(self, name: str, prefix: int, tenant: str) -> None:
        self.sync(name, 0, 0, 50.0, 10_000.0, 0, split(prefix_digests([prefix] * 700, tenant)))

    @rule(name=st.sampled_from(ENGINES))
    def silent_release(self, name: str) -> None:
        """A sync of an engine that does not publish claims what is first."""
        self.check_in_order(name, self.run(self.engines[name].sync([], [], load(name), 2**40, 1)))

    @rule(name=st.sampled_from(ENGINES))
    def dies(self, name: str) -> None:
        if name not in self.joined:
            return
        done = [one for one, owner in self.claimed.items() if owner == name]  # so that none returns to the queue
        self.run(self.engines[name].sync([], done, load(name), 0, 0, PrefixReport()))
        self.client.delete(self.key(f"lease:{name}"), self.key("reached"))
        self.run(self.gateway.fleet())
        self.joined.discard(name)
        self.lapsed.add(name)
        assert not self.client.exists(self.key(f"prefixes:{name}"))
        assert not self.client.hexists(self.key("spare"), name)

    @rule(
        name=st.sampled_from(ENGINES),
        room=st.sampled_from((0, 100, 800, 3000, 2**40)),
        requests=st.integers(0, 4),
        token_us=st.sampled_from((0.0, 50.0, 1e6)),
        step_us=st.sampled_from(STEP_US),
        backlog=st.sampled_from((0, 500, 5000)),
    )
    def sync(
        self,
        name: str,
        room: int,
        requests: int,
        token_us: float,
        step_us: float,
        backlog: int,
        removed: list[bytes] | None = None,
    ) -> None:
        before = self.snapshot()
        report = PrefixReport([], removed or [], token_us, step_us, backlog)
        done = [one for one, owner in self.claimed.items() if owner == name]  # each ends at once, so none runs isolated
        got = self.run(self.engines[name].sync([], done, load(name), room, requests, report))
        self.check(name, got, before, room, requests, report)

    # ------------------------------------------------------------------------------------------------------ checks

    def snapshot(self) -> dict[str, Any]:
        """What Redis says before a sync: queues, counters, passed requests."""
        return {
            "queues": {
                (lane, tenant): [
                    (name.decode(), int(place // PLACES))
                    for name, place in self.client.zrange(self.key(f"queue:{lane}:{tenant}"), 0, -1, withscores=True)
                ]
                for lane in LANES
                for tenant in TENANTS
            },
            "counters": {t: float(self.client.hget(self.key("counters"), t) or 0) for t in TENANTS},
            "passed": {
                name.decode(): int(value.split()[0]) for name, value in self.client.hgetall(self.key("passed")).items()
            },
            "ages": {
                name.decode(): int(since)
                for lane in LANES
                for name, since in self.client.zrange(self.key(f"ages:{lane}"), 0, -1, withscores=True)
            },
            "now": int(self.run(self.gateway.fleet()).time_ms),
        }

    def take(self, name: str, got: SyncReply) -> list[str]:
        """Each claimed request waited, and is claimed once."""
        assert not got.reassigned
        ids = [request.id for request in got.generates]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= self.waiting
        self.waiting -= set(ids)
        self.claimed.update(dict.fromkeys(ids, name))
        self.joined.add(name)
        self.lapsed.discard(name)
        return ids

    def check_in_order(self, name: str, got: SyncReply) -> None:
        queues = {lane: sorted(self.waiting & {n for n, w in self.lanes.items() if w == lane}) for lane in LANES}
        ids = self.take(name, got)
        assert got.retry_ms == 0
        if self.waiting or ids:
            assert len(ids) == 1
            assert ids[0] in (queues["on_time"] or queues["late"])

    def check(
        self, name: str, got: SyncReply, before: dict[str, Any], room: int, requests: int, report: PrefixReport
    ) -> None:
        waited = len(self.waiting)
        # The script counts the engines before it adds this one, unless the engine had to rejoin.
        share = -(-waited // max(1, len(self.joined | ({name} & self.lapsed))))
        ids = self.take(name, got)
        size = {one: len(request.token_ids) for one, request in self.requests.items()}
        assert sum(size[one] for one in ids) <= room
        assert len(ids) <= min(requests, share)
        queues, counters = before["queues"], dict(before["counters"])
        passed_after = {one.decode() for one in self.client.hkeys(self.key("passed"))}

        def left(lane: str, tenant: str) -> bool:
            """Whether the engine may have left all of the tenant's window to others."""
            window = self.window(queues[lane, tenant])
            return bool(window) and all(
                one in passed_after or (self.requests[one].prefixes and one in before["passed"]) for one in window
            )

        for one in ids:
            lane, tenant = self.lanes[one], self.requests[one].tenant
            window = self.window(queues[lane, tenant])
            assert one in window  # the first WINDOW of the head's priority class
            self.check_overtaken(one, window, before)
            if lane == "late":
                assert all(not queues["on_time", t] or left("on_time", t) for t in TENANTS)
            for other in TENANTS:
                ahead = queues[lane, other] and (counters[other], other) < (counters[tenant], tenant)
                assert not ahead or left(lane, other), "another tenant's turn"
            queues[lane, tenant] = [entry for entry in queues[lane, tenant] if entry[0] != one]
            counters[tenant] += size[one] / TENANTS[tenant]
        self.check_patience(before, report)
        self.check_work(ids, queues, min(requests, share), room - sum(size[one] for one in ids), got, report)

    def window(self, queue: list[tuple[str, int]]) -> list[str]:
        return [name for name, priority in queue if priority == queue[0][1]][:WINDOW]

    def check_overtaken(self, one: str, window: list[str], before: dict[str, Any]) -> None:
        """No earlier request is passed over again whose patience had ended."""
        for earlier in window[: window.index(one)]:
            assert before["now"] <= before["passed"].get(earlier, FAR), "passed over beyond the bound"

    def check_patience(self, before: dict[str, Any], report: PrefixReport) -> None:
        """A request that was passed over now for the first time waits as long again at most, or for its prompt."""
        after = {name.decode(): value for name, value in self.client.hgetall(self.key("passed")).items()}
        for name in after.keys() - before["passed"].keys():
            until, since = map(int, after[name].split())
            backlog = report.backlog + 700 * 4
            compute_us = (700 + backlog) * report.token_us
            assert since >= before["now"]
            assert until - since <= max(since - before["ages"][name], compute_us / 1000) + 1

    def check_work(
        self,
        ids: list[str],
        queues: dict[tuple[str, str], list[tuple[str, int]]],
        most: int,
        room: int,
        got: SyncReply,
        report: PrefixReport,
    ) -> None:
        """An engine with capacity for the first request leaves without it only for a bounded time, and syncs again."""
        heads = [queue[0][0] for queue in queues.values() if queue]
        if len(ids) >= most or not heads or any(len(self.requests[one].token_ids) > room for one in heads):
            return
        assert got.retry_ms >= 1
        worst_us = 700 * report.token_us  # what it would need itself
        assert got.retry_ms <= worst_us / 1000 + 1
        assert report.token_us > 0
        assert len(self.joined) > 1

    @invariant()
    def the_queue_agrees(self) -> None:
        if hasattr(self, "client"):
            waiting = {name.decode() for name in self.client.hkeys(self.key("waiting"))}
            assert waiting == self.waiting
            with_digests = {name for name in self.waiting if self.requests[name].prefixes}
            assert {name.decode() for name in self.client.hkeys(self.key("prefixes"))} == with_digests
            assert {name.decode() for name in self.client.hkeys(self.key("passed"))} <= self.waiting


@pytest.mark.usefixtures("patient")
def test_every_bound_holds_in_any_order(redis_server: EmbeddedRedis) -> None:
    LocalityModel.server = redis_server
    run_state_machine_as_test(
        LocalityModel,
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
        ),
    )
