"""However much happens at once, one turn of the gateway's event loop does a bounded part of it."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import msgspec
import pytest

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import Delta, Finish, Generate, Sampling, TokenBatch
from quire.service.common import pacing
from quire.service.common.metrics import Telemetry
from quire.service.common.pacing import TURN_CALLS, TURN_EVENTS, Pacer, QuietCollector, StallWatch, new_event_loop
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams
from tests.pace import paced
from tests.service.delivery.test_streams import COST, Wire
from tests.service.fakes import settled

MANY = 1000


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._loop.call_soon(self._next)


async def test_callbacks_run_in_order_and_at_most_so_many_a_turn() -> None:
    pacer, turns, ran = Pacer(), Turns(), list[int]()
    when: Counter[int] = Counter()

    def note(number: int) -> None:
        ran.append(number)
        when[turns.number] += 1

    for number in range(3):
        pacer.call_soon(note, number)
    assert ran == [0, 1, 2]  # no callback waits while this turn has calls left
    await asyncio.sleep(0.01)
    for number in range(3, MANY):
        pacer.call_soon(note, number)
    await settled(lambda: len(ran) == MANY)
    assert ran == list(range(MANY))
    assert max(when.values()) <= 2 * TURN_CALLS  # what ran at once may share a turn with what waited


async def test_a_callback_that_raises_stops_none_of_the_others() -> None:
    pacer, ran, errors = Pacer(), list[int](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))

    def note(number: int) -> None:
        if number == TURN_CALLS + 5:
            raise ValueError("a bug")
        ran.append(number)

    for number in range(3 * TURN_CALLS):
        pacer.call_soon(note, number)
    await settled(lambda: len(ran) == 3 * TURN_CALLS - 1)
    assert errors == ["a bug"]


def ends_by_deadline(streams: Streams, wire: Wire) -> None:
    """Nothing to do: the requests are opened with a deadline that passes at once."""


def ends_by_drain(streams: Streams, wire: Wire) -> None:
    streams.end_all(Finish("cancelled"))


def ends_by_engine(streams: Streams, wire: Wire) -> None:
    streams.deliver(TokenBatch("e0", [Delta(f"r{at}.0", 0, [5], Finish("length")) for at in range(MANY)]))


@pytest.mark.parametrize("end", [ends_by_deadline, ends_by_drain, ends_by_engine])
async def test_streams_that_end_at_once_wake_few_handlers_in_a_turn(end: Callable[[Streams, Wire], None]) -> None:
    wire = Wire()
    streams = Streams(cast(GatewaySide, wire), GatewayConfig(fleet_s=0.01), Telemetry("g"))
    await streams.start()
    turns, woken, waiting, ended = Turns(), Counter[int](), set[int](), 0
    timeout_s = 2.0 if end is ends_by_deadline else 60.0

    async def handler(at: int) -> None:
        nonlocal ended
        request = Generate(f"r{at}.0", "g", [1], 9, Sampling(), int(time.time() * 1000) + 60_000)
        async with streams.open([request], msgspec.structs.replace(COST, timeout_s=timeout_s)) as opened:
            waiting.add(at)
            async for changed in opened:
                woken[turns.number] += 1
                for mailbox in changed:
                    mailbox.take()
                    opened.end(mailbox.choice)
        ended += 1

    tasks = [asyncio.create_task(handler(at)) for at in range(MANY)]
    await settled(lambda: len(waiting) == MANY)
    end(streams, wire)
    await asyncio.gather(*tasks)
    assert ended == MANY
    assert sum(woken.values()) == MANY
    assert max(woken.values()) <= 2 * TURN_CALLS
    assert len(wire.cancelled) == (0 if end is ends_by_engine else MANY)
    await streams.stop()


async def test_a_batch_of_many_deltas_is_dealt_with_in_several_turns() -> None:
    wire = Wire()
    streams = Streams(cast(GatewaySide, wire), GatewayConfig(fleet_s=0.01), Telemetry("g"))
    await streams.start()
    turns, sizes = Turns(), dict[int, int]()
    deliver = streams.deliver

    def counted(batch: TokenBatch) -> None:
        sizes[turns.number] = sizes.get(turns.number, 0) + len(batch.deltas)
        deliver(batch)

    streams.deliver = counted  # type: ignore[method-assign]
    wire.incoming.put_nowait(TokenBatch("e0", [Delta(f"r{at}.0", 0, [5]) for at in range(2500)]))
    await settled(lambda: sum(sizes.values()) == 2500)
    assert list(sizes.values()) == [1000, 1000, 500]
    await streams.stop()


async def test_timers_run_in_order_few_a_turn_and_a_cancelled_one_not_even_when_it_is_due() -> None:
    pacer, turns, ran, loop = Pacer(), Turns(), list[int](), asyncio.get_running_loop()
    when: Counter[int] = Counter()
    due = loop.time() + 0.05

    def note(number: int) -> None:
        ran.append(number)
        when[turns.number] += 1
        if number == 0:
            timers[MANY - 1].cancel()  # it is due, and waits for its turn

    timers = [pacer.call_at(due, note, number) for number in range(MANY)]
    late = pacer.call_at(due + 60, note, -1)
    soon = pacer.call_at(due - 0.04, note, -2)  # before those that were there
    for timer in timers[1:300]:
        timer.cancel()
        timer.cancel()
    await settled(lambda: len(ran) == MANY - 299)
    assert ran == [-2, 0, *range(300, MANY - 1)]
    assert max(when.values()) <= TURN_CALLS
    soon.cancel()  # it has run
    late.cancel()
    await asyncio.sleep(0.01)
    assert len(ran) == MANY - 299


async def test_cancelled_timers_do_not_pile_up_and_one_that_raises_stops_no_other() -> None:
    pacer, ran, loop = Pacer(), list[int](), asyncio.get_running_loop()
    for _ in range(10_000):
        pacer.call_at(loop.time() + 600, ran.append, 0).cancel()
    assert len(pacer._timers) <= 300
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(str(context["exception"])))

    def fail() -> None:
        pacer.call_at(loop.time(), ran.append, 2)
        raise ValueError("a bug")

    now = loop.time()
    pacer.call_at(now, fail)
    pacer.call_at(now + 0.01, ran.append, 1)
    await settled(lambda: sorted(ran) == [1, 2])
    assert errors == ["a bug"]


def test_a_loop_looks_at_few_sockets_a_turn() -> None:
    """All of them are readable at once."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        pairs = [socket.socketpair() for _ in range(200)]
        read: Counter[int] = Counter()

        async def run() -> None:
            turns, loop = Turns(), asyncio.get_running_loop()

            def readable(end: socket.socket) -> None:
                read[turns.number] += 1
                loop.remove_reader(end)

            for ours, theirs in pairs:
                theirs.send(b"x")
                loop.add_reader(ours, readable, ours)
            await settled(lambda: sum(read.values()) == len(pairs))

        runner.run(run())
        for pair in pairs:
            for end in pair:
                end.close()
    assert max(read.values()) <= TURN_EVENTS


async def test_a_stall_is_seen_with_what_this_process_did_in_it() -> None:
    found: list[tuple[float, float]] = []
    watch = StallWatch(lambda late_s, busy_s: found.append((late_s, busy_s)))
    watch.start()
    await settled(lambda: len(found) >= 3)
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    await settled(lambda: max(found)[0] >= 0.28)
    late, busy = max(found)
    assert 0.28 <= busy <= late
    found.clear()
    stall_s = paced(0.3)
    time.sleep(stall_s)  # noqa: ASYNC251 (as if another process had the core)
    await settled(lambda: bool(found) and max(found)[0] >= 0.9 * stall_s)
    late, busy = max(found)
    assert busy <= late / 3
    watch.stop()


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def gateway_collector() -> Iterator[None]:
    """Python's garbage collector as a gateway process sets it."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*pacing.GC_THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py does


@pytest.mark.usefixtures("gateway_collector")
def test_no_full_collection_while_the_objects_of_many_requests_are_made() -> None:
    """16,000 open requests have a million objects; the automatic collections look at some ten thousand each."""
    walked: Counter[int] = Counter()

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            walked[about["generation"]] += 1
            walked[-1] = max(walked[-1], sum(len(gc.get_objects(one)) for one in range(about["generation"] + 1)))

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(1_000_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 1_000_000
    assert walked[1] > 10
    assert not walked[2]
    assert walked[-1] < 50_000


@pytest.mark.usefixtures("gateway_collector")
async def test_a_full_collection_waits_until_few_connections_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "QUIET_S", 0.001)
    open_now = pacing.QUIET_CONNECTIONS + 1
    looks = 0

    def connections() -> int:
        nonlocal looks
        looks += 1
        return open_now

    ring = Ring()
    freed = weakref.ref(ring)
    gc.collect(1)  # it is old now: only a full collection finds it
    del ring
    collector = QuietCollector(connections)
    collector.start()
    try:
        await settled(lambda: looks > 3)
        assert freed() is not None
        open_now -= 1
        await settled(lambda: freed() is None)
        seen = looks
        await asyncio.sleep(0.02)
        assert looks == seen  # nothing has grown old since: nothing to look for
    finally:
        collector.stop()
