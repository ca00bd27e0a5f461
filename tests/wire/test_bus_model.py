"""Queue, token logs and usage against a model, over any order of submit, claim, cancel, finish, lapse and return.

Tenants have different weights, requests different priorities, and both lanes wait.  On-time requests become overdue.
Engines keep sending after their lease has lapsed.  Suspects run isolated."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import MAX_ATTEMPTS, OUTPUT_COST
from quire.engine.wire.messages import Delta, EngineLoad, Generate, Sampling, TokenBatch
from quire.engine.wire.records import LANES, Fleet, Place, QueueBounds
from quire.engine.wire.token_log import LoggedOutput
from tests.matrix import examples
from tests.wire.sides import LONG_MS

ENGINES = ("e0", "e1")
TENANTS = {"": 1.0, "half": 0.5, "double": 2.0}
SHARE = 0.25  # the late lane's


def load(engine: str) -> EngineLoad:
    return EngineLoad(engine, "m", "f", 4096, 32000, 16, 100, 100, 0, 0, 0, 0, 0)


class BusModel(RuleBasedStateMachine):
    """The model: arrival order, waiting requests, claims, what a lapsed engine still believes it has, the tenants'
    counters (a second implementation of VTC), each request's emitted tokens, and the suspects."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.namespace = f"books-{uuid.uuid4().hex}"
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.gateway = GatewaySide(self.server.url, "g", namespace=self.namespace)
        self.engines = {
            name: EngineSide(self.server.url, name, namespace=self.namespace, lease_ms=LONG_MS, late_share=SHARE)
            for name in ENGINES
        }
        self.tokens: dict[str, int] = {}  # in order of arrival; ended ones stay
        self.requests: dict[str, Generate] = {}
        self.waiting: set[str] = set()
        self.lanes: dict[str, str] = {}  # request -> its lane, or the one that it returns to
        self.front: set[str] = set()  # waiting requests that have produced tokens
        self.overdue: set[str] = set()
        self.credit = 0.0  # the late lane's, in prompt tokens

        self.counters = dict.fromkeys(TENANTS, 0.0)
        self.sizes: dict[str, int] = {}  # request -> its size class
        self.left: str | None = None  # tenant whose queue emptied last
        self.room = dict.fromkeys(ENGINES, 0)
        self.held: dict[str, set[str]] = {name: set() for name in ENGINES}
        self.known: set[str] = set()  # engines that have synced and not lapsed since
        self.believed: dict[str, set[str]] = {name: set() for name in ENGINES}  # what it would say it holds
        self.stale: set[str] = set()  # engines whose lease lapsed since they last synced
        self.last: dict[str, str] = {}  # request -> the engine it was last taken from
        self.at: dict[tuple[str, str], int] = {}  # (engine, request), as claimed -> output position it resumes from
        self.log: dict[str, list[int]] = {}
        self.attempts: dict[str, tuple[int, int]] = {}  # engines that died with it, and its emitted tokens at that time
        self.suspects: set[str] = set()
        self.trial: dict[str, str | None] = dict.fromkeys(ENGINES)
        self.making_room: str | None = None  # the engine that claims nothing until the first suspect fits
        self.condemned: list[str] = []
        self.over: set[str] = set()
        self.commands: dict[str, list[str]] = {name: [] for name in ENGINES}
        self.ordered: set[str] = set()  # withdrawn while held: its engine must not run it again
        self.run(self.gateway.open())
        for engine in self.engines.values():
            self.run(engine.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def fleet(self) -> Fleet:
        """Read the fleet.  After AWAY_MS without a reader Redis would count as having been away, so that lapses are no
        deaths: the machine may have paused."""
        self.client.delete(f"{{{self.namespace}}}:reached")
        fleet: Fleet = self.run(self.gateway.fleet())
        return fleet

    def teardown(self) -> None:
        sides: list[Any] = [self.gateway, *self.engines.values()]
        for side in sides:
            self.run(side.close())
        self.client.close()
        self.runner.close()

    def owner(self, request_id: str) -> str | None:
        return next((name for name in ENGINES if request_id in self.held[name]), None)

    def tenant(self, request_id: str) -> str:
        return self.requests[request_id].tenant

    def active(self) -> set[str]:
        return {self.tenant(name) for name in self.waiting}

    def join(self, name: str) -> None:
        if self.log[name]:
            self.lanes[name] = "on_time"
            self.front.add(name)
        tenant, active = self.tenant(name), self.active()
        if tenant not in active:
            others = [self.counters[other] for other in active]
            if not others and self.left is not None:
                others = [self.counters[self.left]]
            self.counters[tenant] = max(self.counters[tenant], min(others, default=0.0))
        self.waiting.add(name)

    def leave(self, name: str) -> None:
        if name in self.waiting:
            self.waiting.remove(name)
            self.front.discard(name)
            if not self.lane("late"):
                self.credit = 0.0
            if self.tenant(name) not in self.active():
                self.left = self.tenant(name)

    def charge(self, name: str, tokens: float) -> None:
        self.counters[self.tenant(name)] += tokens / TENANTS[self.tenant(name)]

    def queue(self, lane: str, tenant: str) -> list[str]:
        """A tenant's requests in a lane, in their order."""
        mine = [name for name in self.tokens if name in self.lane(lane) and self.tenant(name) == tenant]
        sizes = self.sizes if lane == "on_time" else dict[str, int]()

        def place(name: str) -> tuple[bool, int, int]:
            if name in self.front:
                return False, self.requests[name].priority, 0
            return True, self.requests[name].priority, sizes.get(name, 0)

        return sorted(mine, key=place)

    def lane(self, lane: str) -> set[str]:
        return {name for name in self.waiting if self.lanes[name] == lane}

    def lane_tokens(self, lane: str) -> int:
        return sum(self.tokens[name] for name in self.lane(lane))

    def behind(self, tenant: str, priority: int, size: int) -> float:
        """Tokens of the tenant's on-time requests that a new one would precede, all counted as equally long."""
        queue = self.queue("on_time", tenant)
        order = {name: (self.requests[name].priority, self.sizes[name]) for name in queue if name not in self.front}
        behind = sum(place > (priority, size) for place in order.values())
        return behind / len(queue) * sum(self.tokens[name] for name in queue) if behind else 0

    def head(self, lane: str) -> str | None:
        """The next request of a lane: of the tenant with the smallest counter."""
        active = {self.tenant(name) for name in self.lane(lane)}
        if not active:
            return None
        return self.queue(lane, min(active, key=lambda tenant: (self.counters[tenant], tenant)))[0]

    def next(self) -> str | None:
        on_time, late = self.head("on_time"), self.head("late")
        if on_time is not None and late is not None and 0 < self.credit >= (1 - SHARE) * self.tokens[late]:
            return late
        return on_time or late

    @rule(
        tokens=st.integers(1, 20),
        tenant=st.sampled_from(sorted(TENANTS)),
        priority=st.sampled_from((-100, -1, 0, 0, 100)),
        excess=st.sampled_from((2**53, -(2**53))) | st.integers(0, 60),
        late_excess=st.sampled_from((2**53, -(2**53))) | st.integers(0, 200),
        most=st.integers(1, 30),
        size=st.integers(0, 2),
    )
    def submit(
        self, tokens: int, tenant: str, priority: int, excess: int, late_excess: int, most: int, size: int
    ) -> None:
        name = f"r{len(self.tokens):03}"  # those of the same millisecond are ordered by name
        request = Generate(
            name,
            "g",
            [0] * tokens,
            1,
            Sampling(),
            int(time.time() * 1000) + LONG_MS,
            priority=priority,
            tenant=tenant,
            weight=TENANTS[tenant],
        )
        room = sum(self.room[engine] for engine in self.known)
        total = tokens + sum(self.tokens[waiting] for waiting in self.waiting)
        lane = None
        if tokens + self.lane_tokens("on_time") - self.behind(tenant, priority, size) <= room + excess:
            lane = "on_time"
        elif total <= room + late_excess:
            lane = "late"
        full = lane is not None and len(self.waiting) >= most
        ahead = len(self.lane("on_time") if lane == "on_time" else self.waiting)
        bounds = QueueBounds(excess, late_excess, LONG_MS, most, size_class=size)
        queue = self.run(self.gateway.submit(request, bounds=bounds))
        assert (queue.lane, queue.full) == (None if full else lane, full)
        assert queue.free_tokens == room
        if queue.accepted:
            assert queue.ahead == ahead
            self.requests[name], self.tokens[name], self.log[name] = request, tokens, []
            self.lanes[name], self.sizes[name] = queue.lane, size
            self.join(name)
        assert queue.queued == len(self.waiting)

    @rule(data=st.data())
    def become_overdue(self, data: st.DataObject) -> None:
        """Some on-time requests have waited for all of their target; the next reading of the fleet moves them."""
        self.mark_overdue(data)

    def mark_overdue(self, data: st.DataObject) -> None:
        if fresh := sorted(self.lane("on_time") - self.front):
            for name in data.draw(st.sets(st.sampled_from(fresh))):
                key = f"{{{self.namespace}}}:"
                self.client.hset(f"{key}req:{name}", "due", 1)
                self.client.zadd(f"{key}due", {name: 1})
                self.overdue.add(name)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.tokens:
            return
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.run(self.gateway.cancel(name))
        self.leave(name)
        self.suspects.discard(name)
        self.over.add(name)
        # A held one stays with its engine, who gets one command and will report it finished.
        if (owner := self.owner(name)) is not None and name not in self.ordered:
            self.commands[owner].append(name)
            self.ordered.add(name)

    @rule(
        name=st.sampled_from(ENGINES),
        room=st.integers(0, 40),
        requests=st.integers(0, 4),
        said=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        data=st.data(),
    )
    def sync(self, name: str, room: int, requests: int, said: list[int], data: st.DataObject) -> None:
        self.mark_overdue(data)  # the claim moves those that it meets
        mine = sorted(self.believed[name])
        some = st.lists(st.sampled_from(mine), unique=True) if mine else st.just([])
        self.talk(name, data.draw(some), data.draw(some), said, room, requests)

    @rule(name=st.sampled_from(ENGINES), data=st.data(), crashes=st.integers(1, 3))
    def crash(self, name: str, data: st.DataObject, crashes: int) -> None:
        """It claims what it can, some of that says a token, and it dies; again and again."""
        for _ in range(crashes):
            self.talk(name, [], [], [], 1000, 1000)
            lucky = data.draw(st.sets(st.sampled_from(sorted(self.believed[name])))) if self.believed[name] else ()
            self.talk(name, [], sorted(lucky), [7], 0, 0)
            self.lapse(name)

    def talk(
        self, name: str, finished: list[str], talking: list[str], said: list[int], room: int, requests: int
    ) -> None:
        """One sync, and what must come of it."""
        batch = TokenBatch(name, [Delta(one, self.at[name, one], said) for one in talking])
        self.at.update({(name, one): self.at[name, one] + len(said) for one in talking})
        claimed = self.run(self.engines[name].sync([("g", batch)], finished, load(name), room, requests))
        # On a machine that pauses for STALE_MS, its free capacity must still count.
        self.client.zadd(f"{{{self.namespace}}}:offers", {name: 2**52}, xx=True)

        lost: set[str] = set()
        if name in self.stale:  # nothing it says of what it holds no more counts
            for owner, one in self.at:
                if (
                    owner == name
                    and one in self.believed[name] & (self.waiting | self.suspects)
                    and self.last[one] == name
                ):
                    self.leave(one)
                    self.suspects.discard(one)
                    self.charge(one, self.tokens[one])
                    self.held[name].add(one)
            self.stale.discard(name)
            self.known.add(name)
            lost = self.believed[name] - self.held[name]
            self.believed[name] -= lost
        assert set(claimed.reassigned) == lost

        for one in talking:
            if one in self.held[name]:
                self.log[one] = self.log[one] + said
                self.charge(one, OUTPUT_COST * len(said))
        for one in finished:
            if one in self.held[name]:
                self.held[name].discard(one)
                self.believed[name].discard(one)
                self.over.add(one)

        trial = self.trial[name]
        if trial is not None and (
            trial not in self.held[name] or trial in self.over or len(self.log[trial]) > self.attempts[trial][1]
        ):
            self.attempts.pop(trial, None)
            trial = self.trial[name] = None
        expected: list[str] = []
        closed = trial is not None
        share = -(-len(self.waiting) // max(1, len(self.known)))
        self.known.add(name)
        if self.suspects and requests and not closed:
            suspect = min(self.suspects, key=self.place)
            if self.tokens[suspect] <= room:
                self.suspects.discard(suspect)
                self.charge(suspect, self.tokens[suspect])
                expected, self.trial[name] = [suspect], suspect
                self.making_room, closed = None, True
            elif self.making_room in (None, name):
                self.making_room, closed = name, True
        if closed:
            room = 0
        else:
            while self.waiting and len(expected) < min(requests, share):
                self.move_overdue_heads()
                request_id = self.next()
                assert request_id is not None
                if self.tokens[request_id] > room:
                    break
                room -= self.tokens[request_id]
                self.leave(request_id)
                self.count_share(self.lanes[request_id], self.tokens[request_id])
                self.charge(request_id, self.tokens[request_id])
                expected.append(request_id)
        self.held[name] |= set(expected)
        for one in expected:
            self.at.pop((name, one), None)
            self.at[name, one] = len(self.log[one])
        self.believed[name] |= set(expected)
        self.room[name] = room if len(expected) < requests else 0
        assert [request.id for request in claimed.generates] == expected
        assert claimed.resumed == {one: [LoggedOutput(self.log[one])] for one in expected if self.log[one]}
        assert [abort.id for abort in claimed.aborts] == self.commands[name]
        self.commands[name] = []

    def move_overdue_heads(self) -> None:
        while (name := self.head("on_time")) in self.overdue:
            assert name is not None
            self.lanes[name] = "late"
            self.overdue.discard(name)

    def count_share(self, lane: str, tokens: int) -> None:
        """So many prompt tokens were claimed from this lane."""
        if lane == "late":
            self.credit = max(0.0, self.credit - (1 - SHARE) * tokens)
        elif self.lane("late"):
            self.credit += SHARE * tokens

    def place(self, name: str) -> tuple[int, int]:
        return self.requests[name].priority, list(self.tokens).index(name)

    @rule(name=st.sampled_from(ENGINES))
    def dies(self, name: str) -> None:
        self.lapse(name)

    def lapse(self, name: str) -> None:
        self.client.delete(f"{{{self.namespace}}}:lease:{name}")
        self.fleet()
        if name not in self.known:
            return
        back = sorted(self.held[name] - self.over, key=self.place)
        for one in back:
            self.charge(one, -self.tokens[one])
        stuck = []
        for one in back:
            attempts, before = self.attempts.get(one, (0, -1))
            attempts = attempts + 1 if before == len(self.log[one]) else 1
            self.attempts[one] = attempts, len(self.log[one])
            if attempts >= MAX_ATTEMPTS:
                stuck.append(one)
                if one == self.trial[name]:
                    stuck = [one]
                    break
        self.trial[name] = None
        if len(stuck) == 1:
            self.condemned += stuck
            self.over |= set(stuck)
        else:
            self.suspects |= set(stuck)
        for one in back:
            if one not in self.suspects | self.over:
                self.join(one)
        self.last.update(dict.fromkeys(back, name))
        self.held[name] = set()
        self.known.discard(name)
        self.stale.add(name)

    @invariant()
    def the_model_agrees(self) -> None:
        fleet = self.fleet()
        for name in self.overdue & self.lane("on_time"):
            self.lanes[name] = "late"
        self.overdue.clear()
        assert fleet.queued == len(self.waiting)
        assert fleet.queued_tokens == sum(self.tokens[name] for name in self.waiting)
        prefix = f"{{{self.namespace}}}:"
        client: Any = self.client  # its types allow text, which this one never returns
        waiting = {key.decode(): entry.decode() for key, entry in client.hgetall(f"{prefix}waiting").items()}
        sizes = {name: len(msgspec.msgpack.encode(self.requests[name])) for name in self.waiting}
        assert waiting == {
            name: f"{self.tokens[name]} {sizes[name]} {self.lanes[name]} {self.tenant(name)}" for name in self.waiting
        }
        assert int(client.get(f"{prefix}queued_bytes") or 0) == sum(sizes.values())
        assert float(client.get(f"{prefix}late_credit") or 0) == pytest.approx(self.credit)
        for lane, queue in (("on_time", fleet.on_time), ("late", fleet.late)):
            assert (queue.requests, queue.tokens) == (len(self.lane(lane)), self.lane_tokens(lane))
        arrived = [name for name in self.tokens if name in self.waiting]
        ordered = sorted(arrived, key=lambda name: self.lanes[name] == "late")
        places = {name: Place(self.lanes[name], at) for at, name in enumerate(ordered)}  # type: ignore[arg-type]
        found = self.run(self.gateway.places(list(self.tokens)))
        assert found == places
        active = self.active()
        assert fleet.tenants.keys() == active
        for tenant, weight in TENANTS.items():
            for lane in LANES:
                order = [name.decode() for name in client.zrange(f"{prefix}queue:{lane}:{tenant}", 0, -1)]
                assert order == self.queue(lane, tenant)
            if tenant in active:
                turn = fleet.tenants[tenant]
                mine = [name for name in self.waiting if self.tenant(name) == tenant]
                assert turn.queued_tokens == sum(self.tokens[name] for name in mine)
                assert turn.late_tokens == sum(self.tokens[name] for name in self.queue("late", tenant))
                assert (turn.counter, turn.weight) == (self.counters[tenant], weight)
        for name in ENGINES:
            held = {member.decode() for member in client.zrange(f"{prefix}held:{name}", 0, -1)}
            assert held == self.held[name]
        suspects = {name.decode() for name in client.zrange(f"{prefix}suspects", 0, -1)}
        assert suspects == self.suspects
        assert {one.request.id for one in self.run(self.gateway.operations.quarantined())} == set(self.condemned)
        for name, said in self.log.items():
            assert self.run(self.gateway.log(name, 0, 0, 1000)).token_ids == said


@pytest.mark.usefixtures("patient")
def test_the_model_agrees_in_any_order(redis_server: EmbeddedRedis) -> None:
    BusModel.server = redis_server
    run_state_machine_as_test(
        BusModel,
        settings=settings(
            max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
