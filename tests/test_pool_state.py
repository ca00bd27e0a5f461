"""Snapshots of the block pool: what they show is what the block accounting has, and no watcher means no work."""

from __future__ import annotations

import asyncio
import math
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.engine.commands import LocalBox
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import BlockPool
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.sequence import Sequence
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.observers import pool_state
from quire.engine.observers.pool_state import PoolObserver, PoolPublisher, PoolSnapshot, TableReader, copy_counts
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Generate, PoolState, Sampling, SequenceBlocks
from tests.core.machine import SchedulerMachine
from tests.core.rig import Rig
from tests.matrix import examples
from tests.service.fakes import settled

INFO = ModelInfo("scripted", "f00d", 100, 256, [0], 64)


class Kept(PoolPublisher):
    """Keeps what it is offered instead of writing it."""

    def __init__(self, *, wanted: bool = True) -> None:
        super().__init__("e0", asyncio.new_event_loop())
        self._loop.close()
        self.wanted, self.offered = wanted, list[PoolSnapshot]()

    def offer(self, snapshot: PoolSnapshot) -> None:
        super().offer(snapshot)
        self.offered.append(snapshot)


def observer(core: Scheduler) -> PoolObserver:
    return PoolObserver(core, Kept())


def unpack(one: SequenceBlocks) -> list[int]:
    """The block table that runs stand for."""
    runs = array("I")
    runs.frombytes(one.runs)
    return [block for first, count in zip(runs[::2], runs[1::2], strict=True) for block in range(first, first + count)]


def expected_cells(core: Scheduler) -> list[int]:
    """A byte for each block, from the tables and the pool's own lists."""
    pool, cells = core.pool, [0] * core.pool.total
    for block in pool._idle:
        cells[block] = 1
    for seq in core.live():
        for block in seq.table:
            cells[block] = max(2, cells[block] + 1)
    return cells


def check(core: Scheduler, state: PoolState) -> None:
    assert list(state.cells) == expected_cells(core)
    assert list(state.cells).count(0) + list(state.cells).count(1) == core.pool.available
    assert list(state.cells).count(1) == core.pool.idle
    tables = {(seq.request.id, seq.index): seq.table for seq in core.live() if seq.table}
    assert {(one.id, one.index): unpack(one) for one in state.sequences} == tables
    assert state.left_out == 0
    assert state.host_used == sum(len(seq.host) for seq in core.live())


class WatchedMachine(SchedulerMachine):
    """The scheduler's machine, with a watcher that looks now and then: tables are read as they grow in between."""

    watching: tuple[Scheduler, PoolObserver] | None = None

    @rule()
    def look(self) -> None:
        core = self.rig.core
        if self.watching is None or self.watching[0] is not core:  # the engine was started again
            self.watching = core, observer(core)
        check(core, self.watching[1].snapshot().describe("e0"))


TestWatchedMachine = WatchedMachine.TestCase
TestWatchedMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_forks_and_prefix_hits_are_shared_and_a_finished_prompt_is_cached() -> None:
    rig = Rig(blocks=48, depth=1)
    watch = observer(rig.core)
    prompt = [7 + i % 11 for i in range(18)]  # four blocks of 4 and a half

    def counts() -> list[int]:
        cells = watch.snapshot().describe("e0").cells
        return [cells.count(value) for value in range(6)]

    assert counts() == [48, 0, 0, 0, 0, 0]
    rig.add(prompt, 40, n=3, ignore_eos=True)
    rig.submit()
    rig.commit()
    assert counts()[4] == 5  # three tables name the prompt's blocks
    rig.add([*prompt, 20], 40, ignore_eos=True)
    rig.submit()
    rig.commit()
    assert counts()[5] == 4  # and a fourth found its full blocks in the cache
    assert counts()[2] >= 3  # each fork has a copy of the half-full block; one may have kept the original
    check(rig.core, watch.snapshot().describe("e0"))
    rig.run()
    assert counts()[1] > 4
    assert counts()[2:] == [0, 0, 0, 0]


@settings(max_examples=examples(40))
@given(
    total=st.sampled_from([1, 16_383, 16_384, 16_385, 40_000, 100_000]),
    seed=st.integers(0, 2**32 - 1),
    most=st.sampled_from([1, 3, 1_000]),
)
def test_a_cell_shows_the_greatest_value_of_its_blocks(total: int, seed: int, most: int) -> None:
    random = np.random.default_rng(seed)
    refs = random.integers(0, most + 1, total).astype(np.int32) * random.integers(0, 2, total, dtype=np.int32)
    sealed = random.integers(0, 2, total).astype(np.uint8)
    state = PoolSnapshot(refs, sealed, [], 0, 0, 0).describe("e0")
    values = [
        min(255, 1 + count) if count else kept for count, kept in zip(refs.tolist(), sealed.tolist(), strict=True)
    ]
    k = state.per_cell
    assert k == -(-total // 16_384)
    assert list(state.cells) == [max(values[at : at + k]) for at in range(0, total, k)]
    assert len(state.cells) <= 16_384


def test_counts_are_copies() -> None:
    pool = BlockPool(4, 16)
    refs, sealed = copy_counts(pool)
    pool.seal(pool.allocate(1)[0], b"digest")
    assert refs.tolist() == [0] * 4
    assert sealed.tolist() == [0] * 4
    refs, sealed = copy_counts(pool)
    assert sorted(refs.tolist()) == [0, 0, 0, 1]
    assert sealed.tolist() == refs.tolist()
    assert pool.views()[0].readonly


def sequences(*tables: list[int]) -> list[Sequence]:
    request = Generate("r", "g", [1], 1, Sampling(), 2**60)
    return [Sequence(request, i, (0, i), frozenset(), 9, [1], table=table) for i, table in enumerate(tables)]


def test_what_a_snapshot_names_is_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_state, "MAX_SEQUENCES", 3)
    monkeypatch.setattr(pool_state, "MAX_RUNS", 5)
    monkeypatch.setattr(pool_state, "MAX_NEW_BLOCKS", 4)
    live = sequences([1, 2, 3], [], [10, 12, 14], [20, 22, 24, 26, 28, 30], [40])
    reader, named = TableReader(), list[list[int]]()
    for _ in range(5):  # four blocks a time
        found, left_out = reader.read(live)
        named.append([one.index for one in found])
        assert len(found) + left_out == 4
    assert named == [[0], [0, 2], [0, 2], [0, 2], [0, 2]]  # the runs of the fourth are too many, the fifth is too late
    assert [unpack(one) for one in found] == [[1, 2, 3], [10, 12, 14]]
    assert [unpack(one) for one in reader.read(live[3:])[0]] == [[40]]


def test_an_unchanged_table_is_not_packed_again_and_a_new_one_is_read_from_its_start() -> None:
    [seq], reader = sequences([5, 6]), TableReader()
    [first], [again] = reader.read([seq])[0], reader.read([seq])[0]
    assert first is again
    seq.table[-1] = 9  # copy on write
    assert unpack(reader.read([seq])[0][0]) == [5, 9]
    seq.table = [5, 9, 10]  # preempted and resumed
    assert unpack(reader.read([seq])[0][0]) == [5, 9, 10]
    seq.table = [5]
    assert unpack(reader.read([seq])[0][0]) == [5]


def run(publisher: Kept, turns: int) -> Engine:
    box = LocalBox(lambda delta: None)
    config = EngineConfig(max_seqs=8, step_tokens=64, check_accounting=True)
    engine = Engine(config, ScriptedExecutor(INFO, 64), box, box)
    engine.observers.append(PoolObserver(engine.core, publisher))
    box.commands.append(Generate("r", "g", [5] * 40, 500, Sampling(ignore_eos=True), 2**60))
    for _ in range(turns):
        engine.turn()
    return engine


def test_no_snapshot_is_taken_while_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: BlockPool) -> Any:
        raise AssertionError("the pool was read")

    monkeypatch.setattr(BlockPool, "views", never)
    publisher = Kept(wanted=False)
    run(publisher, 50)
    assert publisher.offered == []


def test_snapshots_are_a_period_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_state, "PERIOD_S", 1e6)
    publisher = Kept()
    engine = run(publisher, 50)
    assert len(publisher.offered) == 1
    publisher.wanted = False
    engine.turn()
    publisher.wanted = True  # another client begins to watch: it does not wait for the period
    engine.turn()
    assert len(publisher.offered) == 2
    monkeypatch.setattr(pool_state, "PERIOD_S", 0.0)
    monkeypatch.setattr(pool_state, "MAX_SHARE", math.inf)
    publisher.wanted = False
    engine.turn()
    publisher.wanted = True
    for _ in range(10):
        engine.turn()
    assert len(publisher.offered) == 12


def test_slow_snapshots_are_further_apart() -> None:
    """They take half a percent of the loop's time at most, however large the pool is."""
    ticks = iter(range(100))
    publisher = Kept()
    watch = PoolObserver(Rig().core, publisher, lambda: 0.02 * next(ticks))  # each snapshot takes 20 ms
    taken = []
    for tenth in range(100):
        record: Any = SimpleNamespace(marks=[1000.0 + tenth / 10])
        watch.observe(record)
        taken.append(len(publisher.offered))
    assert taken[0] == 1
    assert taken[39] == 1
    assert taken[-1] == 3


class Store:
    """Redis, as the publisher sees it."""

    def __init__(self) -> None:
        self.written: list[PoolState] = []
        self.away = False

    async def write(self, state: PoolState) -> None:
        if self.away:
            raise BusDown("away")
        self.written.append(state)

    async def until(self, count: int) -> None:
        """Wait for the next `count` writes."""
        end = len(self.written) + count
        await settled(lambda: len(self.written) >= end)


async def test_the_newest_snapshot_is_written_and_repeated_while_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_state, "REPEAT_S", 0.01)
    publisher, core = PoolPublisher("e0", asyncio.get_running_loop()), Rig().core
    store: Any = Store()
    publisher.offer(observer(core).snapshot())  # the gateway left meanwhile
    writing = asyncio.create_task(publisher.run(store))
    await asyncio.sleep(0.1)
    assert store.written == []
    publisher.wanted = True
    old, new = observer(core).snapshot(), observer(core).snapshot()._replace(left_out=9)
    publisher.offer(old)
    publisher.offer(new)
    await store.until(3)  # repeated, as during a long step
    assert {state.left_out for state in store.written} == {9}
    store.away = True
    await asyncio.sleep(0.1)
    store.away = False
    await store.until(1)
    assert len([record for record in caplog.records if "could not publish" in record.message]) <= 1
    writing.cancel()
