"""How often and how much the feed of the engines' state sends, on a clock that runs only while nothing else can."""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import PoolState, SequenceBlocks
from quire.engine.wire.records import Fleet
from quire.service.http.engine_state import BURST_BYTES, BYTES_PER_S, PERIOD_S, ByteBudget, EngineStateFeed
from tests.pace import patience
from tests.service.fakes import a_load
from tests.service.http.state_reader import StateReader

BLOCKS = 100_000


class InstantClock(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer as soon as nothing is ready."""

    now = 1000.0

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        this: Any = self
        if not this._ready and this._scheduled:
            self.now = max(self.now, this._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


class Streams:
    """A fleet of one engine, and its published state."""

    def __init__(self) -> None:
        self.pool_states = self
        self.fleet = Fleet([a_load("e0", total_blocks=BLOCKS)], 0, 0, 0)
        self.state = PoolState("e0", BLOCKS, 7, bytes(-(-BLOCKS // 7)))
        self.change: Callable[[], None] = lambda: None
        self.watches, self.away = list[float](), False

    def redis_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    async def watch(self) -> None:
        if self.away:
            raise BusDown("away")
        self.watches.append(asyncio.get_running_loop().time())

    async def read(self, engines: Sequence[str]) -> dict[str, PoolState]:
        if self.away:
            raise BusDown("away")
        self.change()
        return {"e0": self.state} if "e0" in engines else {}


class Watcher:
    """Reads one stream of events as its socket would take it."""

    def __init__(self, feed: EngineStateFeed) -> None:
        self.feed, self.reader = feed, StateReader()
        self.sizes: list[int] = []
        self.times: list[float] = []
        self.comments: list[str] = []

    async def watch(self, seconds: float, pause: float = 0.0) -> None:
        """Watch for so long, taking so many seconds for each event."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        with self.feed._watching():
            async with contextlib.aclosing(self.feed._events()) as events:
                async for data in events:
                    if clock() >= end:
                        return
                    self._take(data)
                    await asyncio.sleep(pause)

    def _take(self, data: bytes) -> None:
        block = data.decode().removesuffix("\n\n")
        if self.reader.feed(block):
            self.sizes.append(len(data))
            self.times.append(asyncio.get_running_loop().time())
        else:
            self.comments.append(block)


def run(work: Callable[[Streams, EngineStateFeed], Awaitable[None]]) -> None:
    async def main() -> None:
        streams: Any = Streams()
        async with asyncio.timeout(patience(10_000)):
            await work(streams, EngineStateFeed(streams))

    loop = InstantClock()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def noise(streams: Streams, seed: int) -> None:
    """Change every cell and every table, as no engine does."""
    chance = random.Random(seed)
    count = len(streams.state.cells)
    tables = [
        SequenceBlocks(
            f"cmpl-{0:012x}{number:08x}{0:012x}.0", 0, array("I", [chance.randrange(BLOCKS), 1] * 16).tobytes()
        )
        for number in range(256)
    ]
    streams.state = PoolState("e0", BLOCKS, 7, chance.randbytes(count), tables)


def busy(streams: Streams, seed: int) -> None:
    """Change what 256 sequences at 40 steps per second change in a fifth of a second: each table by half a block."""
    chance = random.Random(seed)
    cells, sequences = bytearray(streams.state.cells), list(streams.state.sequences)
    for _ in range(128):
        cells[chance.randrange(len(cells))] = chance.choice([0, 1, 2, 2, 3])
    for number in chance.sample(range(256), 128):
        runs = sequences[number].runs if number < len(sequences) else b""
        grown = SequenceBlocks(
            f"cmpl-{0:012x}{number:08x}{0:012x}.0", 0, runs + array("I", [chance.randrange(BLOCKS), 1]).tobytes()
        )
        sequences[number : number + 1] = [grown]
    streams.state = PoolState("e0", BLOCKS, 7, bytes(cells), sequences)


@pytest.mark.parametrize("load", [noise, busy])
def test_a_pool_of_100_000_blocks_takes_less_than_20_kb_a_second(load: Callable[[Streams, int], None]) -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        seeds = iter(range(10_000))
        streams.change = lambda: load(streams, next(seeds))
        watcher = Watcher(feed)
        await watcher.watch(60.0)
        assert sum(watcher.sizes) < 60 * 20_000
        assert sum(watcher.sizes[:-1]) <= BURST_BYTES + 60 * BYTES_PER_S
        assert len(watcher.sizes) > 5

    run(work)


def test_events_are_a_fifth_of_a_second_apart_and_follow_every_change() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        cells = iter(bytes([value]) * 8 for value in range(250))

        def change() -> None:
            streams.state = PoolState("e0", 8, 1, next(cells))

        streams.change = change
        watcher = Watcher(feed)
        await watcher.watch(20.0)
        gaps = [later - earlier for earlier, later in zip(watcher.times, watcher.times[1:], strict=False)]
        assert min(gaps) >= 0.2 - 1e-6
        assert max(gaps) <= 0.4 + 1e-6
        assert 50 <= len(watcher.times) <= 101

    run(work)


def test_a_state_that_does_not_change_is_an_event_a_second() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        watcher = Watcher(feed)
        await watcher.watch(30.0)
        assert 20 <= len(watcher.sizes) <= 31
        assert max(watcher.sizes[1:]) < 60
        assert watcher.comments == []

    run(work)


def test_a_slow_reader_skips_states_and_a_quick_one_is_not_held_up() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        seeds = iter(range(10_000))
        streams.change = lambda: busy(streams, next(seeds))
        slow, quick = Watcher(feed), Watcher(feed)
        await asyncio.gather(slow.watch(60.0, pause=15.0), quick.watch(60.0))
        assert 3 <= len(slow.sizes) <= 5
        assert len(quick.sizes) > 35
        streams.change = lambda: None
        await slow.watch(30.0, pause=2.0)
        expected = [(min(value, 3), max(0, value - 1)) for value in streams.state.cells]
        assert slow.reader.cells["e0"] == expected
        assert len(slow.reader.seqs["e0"]) == 256

    run(work)


def test_one_reader_serves_all_watchers_and_none_is_left_without_them() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        reads: list[float] = []
        streams.change = lambda: reads.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60.0)
        assert (reads, streams.watches) == ([], [])
        watchers = [Watcher(feed) for _ in range(8)]
        await asyncio.gather(*(watcher.watch(10.0) for watcher in watchers))
        assert 45 <= len(reads) <= 55
        assert 9 <= len(streams.watches) <= 12
        assert {len(watcher.sizes) for watcher in watchers} <= {9, 10, 11}
        reads.clear()
        await asyncio.sleep(60.0)
        assert reads == []

    run(work)


def test_while_redis_is_away_comments_say_so_and_then_events_follow() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        watcher = Watcher(feed)
        watching = asyncio.create_task(watcher.watch(40.0))
        await asyncio.sleep(10.0)
        streams.away, events = True, watcher.reader.events
        await asyncio.sleep(10.0)
        assert watcher.reader.events <= events + 1
        assert 7 <= len(watcher.comments) <= 11
        assert watcher.comments[-1].startswith(": redis is away, the state is ")
        streams.away = False
        before = len(streams.watches)
        await asyncio.sleep(1.0)
        assert len(streams.watches) > before  # the key may be lost
        await watching
        assert watcher.reader.events > events + 10
        assert 7 <= len(watcher.comments) <= 12

    run(work)


def test_every_stream_ends_when_the_feed_is_closed() -> None:
    async def work(streams: Streams, feed: EngineStateFeed) -> None:
        clock, watcher = asyncio.get_running_loop().time, Watcher(feed)
        streams.change = lambda: noise(streams, 1)
        watching = asyncio.create_task(watcher.watch(1000.0))
        await asyncio.sleep(5.0)
        began = clock()
        feed.close()
        await watching
        assert clock() - began < 0.01

    run(work)


def test_what_an_event_takes_beyond_the_burst_is_waited_for() -> None:
    budget = ByteBudget(100.0)
    assert budget.spend(BURST_BYTES, 100.0) == PERIOD_S
    assert budget.spend(BYTES_PER_S, 100.0) == 1.0
    assert budget.spend(2 * BYTES_PER_S, 101.0) == 2.0
    assert budget.spend(10, 103.0 + 10 / BYTES_PER_S) == PERIOD_S
    assert budget.spend(BURST_BYTES + BYTES_PER_S, 1000.0) == 1.0  # what was not used does not add up
