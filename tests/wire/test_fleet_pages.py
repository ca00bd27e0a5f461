"""Snapshots of the fleet return changes page by page, and together as much as reading every lease."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import fleet_pages, gateway_side, layout, scripts
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.fleet_pages import LEASE_HEAD, PASS_MS, FleetPage, FleetPages
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import EngineLoad
from quire.engine.wire.records import Fleet
from tests.wire.sides import LONG_MS, Bus, load, take
from tests.wire.test_losses import Snapshots

NAMES = ("e0", "e1", "e2", "e3", "e4")
GATEWAYS = ("g0", "g1")
SMALL_PAGE = 2


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "READING_ENGINES", SMALL_PAGE)
    monkeypatch.setattr(gateway_side, "FLEET", scripts.load("fleet"))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[FleetPage]:
    """The pages that gateways have read."""
    found: list[FleetPage] = []
    record = FleetPages.record

    def spy(self: FleetPages, page: FleetPage) -> None:
        found.append(page)
        record(self, page)

    monkeypatch.setattr(FleetPages, "record", spy)
    return found


def lease(name: str, change: int, time_ms: int = 5) -> bytes:
    return LEASE_HEAD.pack(change, time_ms) + msgspec.msgpack.encode(load(name))


def page(*leases: bytes, engines: int, last: int, following: bytes = b"", known: bool = True, ms: int = 0) -> FleetPage:
    return FleetPage(list(leases), following, engines, last, known, ms)


def names(pages: FleetPages) -> set[str]:
    return {one.engine for one in pages.loads()}


def test_golden_bytes_of_a_lease() -> None:
    """renew_lease in engines.lua writes them."""
    head = bytes.fromhex("401c000000000000 4278bcfe56800000".replace(" ", ""))
    assert LEASE_HEAD.pack(7, 1_700_000_000_000) == head


async def test_a_lease_has_the_number_of_its_change_the_time_and_the_load(bus: Bus) -> None:
    engine = await bus.engine()
    sent = load("e1")
    for number in (1, 2):
        await engine.sync([], [], sent, 0, 0)
        with redis.Redis.from_url(bus.url) as client:
            value: Any = client.get(f"{{{bus.namespace}}}:lease:e1")
            assert int(client.get(f"{{{bus.namespace}}}:changes")) == number
        change, time_ms = LEASE_HEAD.unpack_from(value)
        assert change == number
        assert abs(time_ms - sent.time_ms) < LONG_MS
        assert msgspec.msgpack.decode(value[LEASE_HEAD.size :], type=EngineLoad) == sent


async def test_a_reading_returns_only_what_has_changed(bus: Bus, pages: list[FleetPage]) -> None:
    gateway = await bus.gateway()
    engines = {name: await bus.engine(name) for name in NAMES}
    for name, engine in engines.items():
        await take(engine, name)
    assert len((await gateway.fleet()).engines) == len(NAMES)
    await take(engines["e3"], "e3")
    assert len((await gateway.fleet()).engines) == len(NAMES)
    assert len((await gateway.fleet()).engines) == len(NAMES)
    assert [len(one.leases) for one in pages] == [len(NAMES), 1, 0]


@pytest.mark.usefixtures("small_pages")
async def test_a_reading_looks_at_one_page(bus: Bus, pages: list[FleetPage], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading goes through all pages; the next ones through one each, but for PASS_MS at most."""
    monkeypatch.setattr(fleet_pages, "PASS_MS", LONG_MS)
    gateway = await bus.gateway()
    engines = {name: await bus.engine(name) for name in NAMES}
    for name, engine in engines.items():
        await take(engine, name)
    assert {one.engine for one in (await gateway.fleet()).engines} == set(NAMES)
    assert [one.following for one in pages] == [b"e1", b"e3", b""]
    for _ in range(3):
        for name, engine in engines.items():
            await take(engine, name)
        before = len(pages)
        await gateway.fleet()
        assert len(pages) == before + 1
        assert len(pages[-1].leases) <= SMALL_PAGE
    monkeypatch.setattr(fleet_pages, "PASS_MS", 0)
    before = len(pages)
    await gateway.fleet()
    assert [one.following for one in pages[before:]] == [b"e1", b"e3", b""]


async def test_an_engine_that_has_left_is_missed_by_the_count(bus: Bus, pages: list[FleetPage]) -> None:
    """Another gateway has removed it, so nothing that changed says so."""
    gateway, other = await bus.gateway("g1"), await bus.gateway("g2")
    engines = {name: await bus.engine(name) for name in NAMES}
    for name, engine in engines.items():
        await take(engine, name)
    await gateway.fleet()
    await other.fleet()
    bus.lapse("e2")
    assert len((await other.fleet()).engines) == len(NAMES) - 1
    await take(engines["e3"], "e3")
    before = len(pages)
    assert {one.engine for one in (await gateway.fleet()).engines} == set(NAMES) - {"e2"}
    assert [len(one.leases) for one in pages[before:]] == [1, len(NAMES) - 1]  # the page again, with all its leases


def test_a_page_that_was_read_while_engines_came_and_left() -> None:
    """e1 has left and e2 has come: as many as before."""
    read = FleetPages()
    read.record(page(lease("e1", 1), engines=1, last=1))
    assert read.complete(0)
    assert read.position() == (b"", 1)
    read.record(page(lease("e2", 2), engines=1, last=2))
    assert not read.complete(0)
    assert read.position() == (b"", 0)
    read.record(page(lease("e2", 2), engines=1, last=2))
    assert read.complete(0)
    assert names(read) == {"e2"}


def test_what_changes_between_the_pages_of_a_pass_is_read_by_the_next_pass() -> None:
    read = FleetPages()
    read.record(page(lease("e1", 1), engines=1, last=2, following=b"e1"))
    assert not read.complete(0)
    # e1 changes again: number 3.
    read.record(page(lease("e2", 2), engines=1, last=3))
    assert read.complete(0)
    assert read.position() == (b"", 2)
    read.record(page(lease("e1", 3), engines=1, last=3, following=b"e1"))
    assert read.position() == (b"e1", 3), "the second page was read when change 3 was the last"


def test_pages_that_have_shifted_are_read_from_the_last_change_that_the_first_page_knew() -> None:
    """An engine before the second page has come: its first name is another one."""
    read = FleetPages()
    read.record(page(lease("e1", 1), engines=1, last=2, following=b"e1"))
    read.record(page(lease("e2", 2), engines=1, last=3))
    read.record(page(lease("e0", 4), engines=1, last=4, following=b"e0"))
    assert read.position() == (b"e0", 2)


def test_a_pass_that_takes_long_is_finished_by_one_reading() -> None:
    read = FleetPages()
    read.record(page(lease("e1", 1), engines=1, last=2, following=b"e1", ms=50))
    read.record(page(lease("e2", 2), engines=1, last=2, ms=60))
    read.record(page(engines=1, last=2, following=b"e1", ms=100))
    assert read.complete(100 + PASS_MS - 1)
    assert not read.complete(100 + PASS_MS)


class Readings(RuleBasedStateMachine):
    """Engines sync, die, leave and return; Redis goes back in time or loses its scripts; heartbeats expire."""

    server: EmbeddedRedis
    page: int  # engines per reading

    @initialize()
    def start(self) -> None:
        self.namespace = uuid.uuid4().hex
        self.runner = asyncio.Runner()
        self.client = redis.Redis.from_url(self.server.url)
        self.past = Snapshots(self.client, self.namespace)
        self.kept = False
        self.engines: dict[str, EngineSide] = {}
        self.steps = 0
        self.gateways = {name: GatewaySide(self.server.url, name, namespace=self.namespace) for name in GATEWAYS}
        for gateway in self.gateways.values():
            self.run(gateway.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"

    @rule(name=st.sampled_from(NAMES), room=st.integers(0, 2))
    def sync(self, name: str, room: int) -> None:
        if name not in self.engines:
            self.engines[name] = EngineSide(self.server.url, name, namespace=self.namespace, lease_ms=LONG_MS)
            self.run(self.engines[name].open())
        self.steps += 1
        told = msgspec.structs.replace(load(name), generated_tokens=self.steps)
        try:
            self.run(self.engines[name].sync([], [], told, room, room))
        except BusDown:  # Redis went back to an earlier process of this name: this one ends
            self.run(self.engines.pop(name).close())

    @rule(name=st.sampled_from(NAMES))
    def lapse(self, name: str) -> None:
        self.client.delete(self.key(f"lease:{name}"))

    @rule(data=st.data())
    @precondition(lambda self: self.engines)
    def leave(self, data: st.DataObject) -> None:
        self.run(self.engines.pop(data.draw(st.sampled_from(sorted(self.engines)))).close())

    @rule(name=st.sampled_from(GATEWAYS))
    def fall_silent(self, name: str) -> None:
        self.client.delete(self.key(f"gateway:{name}"))

    @rule(name=st.sampled_from(GATEWAYS))
    def miss(self, name: str) -> None:
        """Its subscription has broken."""
        self.gateways[name]._on_missed()

    @rule()
    def flush_scripts(self) -> None:
        self.client.script_flush()

    @rule()
    def keep(self) -> None:
        self.past.keep()
        self.kept = True

    @rule()
    @precondition(lambda self: self.kept)
    def go_back(self) -> None:
        self.past.go_back()

    @rule(name=st.sampled_from(GATEWAYS), count=st.integers(1, 3))
    def read(self, name: str, count: int) -> None:
        for _ in range(count):
            fleet: Fleet = self.run(self.gateways[name].fleet())
        if self.page >= len(NAMES):
            self.compare(fleet)

    @rule(name=st.sampled_from(GATEWAYS))
    def read_every_page(self, name: str) -> None:
        for _ in range(2 * (len(NAMES) // self.page + 1)):
            fleet: Fleet = self.run(self.gateways[name].fleet())
        self.compare(fleet)

    def compare(self, fleet: Fleet) -> None:
        """With what Redis has: a live engine is one with a lease."""
        expected = {}
        for name in NAMES:
            value: Any = self.client.get(self.key(f"lease:{name}"))
            if value is not None:
                told = msgspec.msgpack.decode(value[LEASE_HEAD.size :], type=EngineLoad)
                expected[name] = told, int(LEASE_HEAD.unpack_from(value)[1])
        assert {one.engine: (one, fleet.exchanged_ms[one.engine]) for one in fleet.engines} == expected

    def teardown(self) -> None:
        for name in GATEWAYS:
            self.read_every_page(name)
        sides: list[Any] = [*self.gateways.values(), *self.engines.values()]
        for side in sides:
            self.run(side.close())
        self.client.close()
        self.runner.close()


def agree(server: EmbeddedRedis, page: int) -> None:
    Readings.server, Readings.page = server, page
    run_state_machine_as_test(
        Readings,
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.every_redis
@pytest.mark.usefixtures("patient")
def test_changes_tell_as_much_as_all_leases(redis_server: EmbeddedRedis) -> None:
    agree(redis_server, layout.READING_ENGINES)


@pytest.mark.every_redis
@pytest.mark.usefixtures("patient", "small_pages")
def test_pages_tell_as_much_as_all_leases(redis_server: EmbeddedRedis) -> None:
    agree(redis_server, SMALL_PAGE)
