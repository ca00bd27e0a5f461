"""The queue's books against a shadow model: any order of submit, claim, cancel, finish, lapse and return."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.wire.bus import EngineSide, GatewaySide
from engine.wire.embedded import EmbeddedRedis
from engine.wire.messages import EngineLoad, Generate, Sampling

ENGINES = ("e0", "e1")


def load(engine: str) -> EngineLoad:
    return EngineLoad(engine, "m", "f", 4096, 32000, 16, 100, 100, 0, 0, 0, 0, 0)


class Books(RuleBasedStateMachine):
    """The model: arrival order, who waits, who holds what, and what a lapsed engine still believes it has."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.namespace = f"books-{uuid.uuid4().hex}"
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.gateway = GatewaySide(self.server.url, "g", namespace=self.namespace)
        self.engines = {
            name: EngineSide(self.server.url, name, namespace=self.namespace, lease_ms=60_000) for name in ENGINES
        }
        self.tokens: dict[str, int] = {}  # in order of arrival; ended ones stay
        self.waiting: set[str] = set()
        self.held: dict[str, set[str]] = {name: set() for name in ENGINES}
        self.known: set[str] = set()  # engines that have exchanged and not lapsed since
        self.lapsed: dict[str, set[str]] = {name: set() for name in ENGINES}
        self.orders: dict[str, list[str]] = {name: [] for name in ENGINES}
        self.ordered: set[str] = set()  # withdrawn while held: its engine must not run it again
        self.run(self.gateway.open())
        for engine in self.engines.values():
            self.run(engine.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        for side in [self.gateway, *self.engines.values()]:
            self.run(side.close())
        self.client.close()
        self.runner.close()

    def owner(self, request_id: str) -> str | None:
        return next((name for name in ENGINES if request_id in self.held[name]), None)

    @rule(tokens=st.integers(1, 20))
    def submit(self, tokens: int) -> None:
        name = f"r{len(self.tokens)}"
        deadline_ms = int(time.time() * 1000) + 600_000
        self.run(self.gateway.submit(Generate(name, "g", [0] * tokens, 1, Sampling(), deadline_ms)))
        self.tokens[name] = tokens
        self.waiting.add(name)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.tokens:
            return
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.run(self.gateway.cancel(name))
        self.waiting.discard(name)
        # A held one stays with its engine, who gets one order and will report it finished.
        if (owner := self.owner(name)) is not None and name not in self.ordered:
            self.orders[owner].append(name)
            self.ordered.add(name)

    @rule(name=st.sampled_from(ENGINES), room=st.integers(0, 40), requests=st.integers(0, 4), data=st.data())
    def exchange(self, name: str, room: int, requests: int, data: st.DataObject) -> None:
        mine = sorted(self.held[name] | self.lapsed[name])
        finished = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        claimed = self.run(self.engines[name].exchange([], finished, load(name), room, requests))
        for request_id in finished:
            owner = self.owner(request_id)
            self.waiting.discard(request_id)
            self.lapsed[name].discard(request_id)
            if owner == name:
                self.held[name].discard(request_id)
            elif owner is not None and request_id not in self.ordered:
                self.orders[owner].append(request_id)
                self.ordered.add(request_id)
        kept = self.lapsed[name] & self.waiting
        lost = self.lapsed[name] - kept
        self.lapsed[name] = set()
        self.waiting -= kept
        self.held[name] |= kept
        expected = []
        requests = min(requests, -(-len(self.waiting) // max(1, len(self.known))))
        self.known.add(name)
        for request_id in [r for r in self.tokens if r in self.waiting]:
            room -= self.tokens[request_id]
            if room < 0 or len(expected) == requests:
                break
            expected.append(request_id)
        self.waiting -= set(expected)
        self.held[name] |= set(expected)
        assert [request.id for request in claimed.generates] == expected
        assert [order.id for order in claimed.aborts] == self.orders[name]
        assert set(claimed.lost) == lost
        self.orders[name] = []

    @rule(name=st.sampled_from(ENGINES))
    def lapse(self, name: str) -> None:
        self.client.delete(f"{{{self.namespace}}}:lease:{name}")
        self.run(self.gateway.fleet())
        alive = self.held[name] - self.ordered
        self.lapsed[name] |= alive
        self.waiting |= alive
        self.held[name] = set()
        self.known.discard(name)

    @invariant()
    def the_books_balance(self) -> None:
        fleet = self.run(self.gateway.fleet())
        assert fleet.queued == len(self.waiting)
        assert fleet.queued_tokens == sum(self.tokens[name] for name in self.waiting)
        prefix = f"{{{self.namespace}}}:"
        sizes = {key.decode(): int(size) for key, size in self.client.hgetall(f"{prefix}sizes").items()}
        assert sizes == {name: self.tokens[name] for name in self.waiting}
        order = [name.decode() for name in self.client.zrange(f"{prefix}queue", 0, -1)]
        assert order == [name for name in self.tokens if name in self.waiting]
        for name in ENGINES:
            held = {member.decode() for member in self.client.zrange(f"{prefix}held:{name}", 0, -1)}
            assert held == self.held[name]


def test_the_books_balance_in_any_order(redis_server: EmbeddedRedis) -> None:
    Books.server = redis_server
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Books,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
