"""What every block of the pool holds, for clients that watch it.

    loop's thread   PoolObserver.observe: copies of counts, new blocks of tables --PoolSnapshot--+
    bus thread      Redis <--PoolState-- PoolPublisher.run <--describe: one byte a cell----------+

The bus thread learns in a sync whether a gateway watches.  Until then a turn costs one look at a flag.  While one
watches, a snapshot is taken at most every PERIOD_S, and so seldom that it takes at most MOST_SHARE of the loop's time.
It copies the reference counts as a whole, and reads of each table only what that has grown by: 0.03 ms for 512 blocks
and 8 sequences, 0.5 to 0.9 ms for 100,000 blocks and 256 sequences.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.core.blocks import BlockPool
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.sequence import Sequence
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.messages import PoolState, SequenceBlocks
from quire.engine.wire.pool_state_store import PoolStateStore

log = logging.getLogger("quire.engine")

PERIOD_S = 0.2  # shortest time between two snapshots
MOST_SHARE = 0.005  # maximum share of the loop's time for snapshots
REPEAT_S = 1.0  # the last state is written again after so long, because it expires
MOST_CELLS = 16_384  # maximum of a state; in a larger pool a cell stands for several blocks
MOST_REFS = 254  # maximum reference count of a cell
MOST_SEQUENCES = 256  # maximum of sequences with block tables in a state
MOST_RUNS = 4_096  # maximum runs of consecutive blocks in one state, over all sequences
MOST_NEW_BLOCKS = 4_096  # maximum entries of block tables per snapshot, under 1 ms: the rest follows in the next ones


class PoolSnapshot(NamedTuple):
    """Copies of what a state is made of."""

    refs: npt.NDArray[np.int32]  # reference count per block
    sealed: npt.NDArray[np.uint8]  # 1 for each block that the prefix index has
    sequences: list[SequenceBlocks]
    left_out: int  # sequences with blocks that are not among `sequences`
    host_blocks: int
    host_used: int

    def describe(self, engine: str) -> PoolState:
        """Return the state that is published under an engine's name."""
        total = len(self.refs)
        per_cell = -(-total // MOST_CELLS)
        values = np.minimum(self.refs, MOST_REFS).astype(np.uint8)
        values += values > 0
        np.maximum(values, self.sealed, out=values)
        if per_cell > 1:
            padded = np.zeros(-(-total // per_cell) * per_cell, np.uint8)
            padded[:total] = values
            columns = padded.reshape(-1, per_cell)
            values = columns[:, 0].copy()
            for column in range(1, per_cell):
                np.maximum(values, columns[:, column], out=values)
        cells = values.tobytes()
        return PoolState(
            engine, total, per_cell, cells, self.sequences, self.left_out, self.host_blocks, self.host_used
        )


class TableRuns:
    """One block table as runs of neighbouring blocks, read as it grows."""

    __slots__ = ("_last", "_read", "_runs", "_table", "packed")

    def __init__(self, table: list[int]) -> None:
        self._table, self._read, self._last = table, 0, -1  # the table, how many of its blocks are read, the last one
        self._runs: list[int] = []  # first block and count, alternately
        self.packed: SequenceBlocks | None = None  # made of these runs

    def continues(self, table: list[int]) -> bool:
        """Whether this is the same table, and only grew since.  A copy-on-write replaces the last block that was read:
        only the block that a sequence writes next is ever replaced."""
        read = self._read
        return table is self._table and len(table) >= read and (not read or table[read - 1] == self._last)

    def read(self, most: int) -> int:
        """Read at most `most` further blocks.  Returns how many it read."""
        new = self._table[self._read : self._read + most]
        if new:
            runs, last = self._runs, self._last
            for block in new:
                if block == last + 1 and runs:
                    runs[-1] += 1
                else:
                    runs.append(block)
                    runs.append(1)
                last = block
            self._last, self.packed = last, None
            self._read += len(new)
        return len(new)

    @property
    def complete(self) -> bool:
        return self._read == len(self._table)

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self._runs) // 2

    def pack(self, seq: Sequence) -> SequenceBlocks:
        """Return the runs as they are sent.  While they do not change it is the same object."""
        if self.packed is None:
            self.packed = SequenceBlocks(seq.request.id, seq.index, array("I", self._runs).tobytes())
        return self.packed


class TableReader:
    """Reads the tables of all live sequences from snapshot to snapshot."""

    def __init__(self) -> None:
        self._known: dict[Sequence, TableRuns] = {}

    def clear(self) -> None:
        """Forget all tables."""
        self._known = {}

    def read(self, live: Iterable[Sequence]) -> tuple[list[SequenceBlocks], int]:
        """Return sequences that hold blocks, within the bounds, and how many others do."""
        known, self._known = self._known, {}
        found: list[SequenceBlocks] = []
        left_out, blocks, runs = 0, MOST_NEW_BLOCKS, MOST_RUNS
        for seq in live:
            table = seq.table
            if not table:
                continue
            if len(self._known) == MOST_SEQUENCES:
                left_out += 1
                continue
            one = known.get(seq)
            if one is None or not one.continues(table):
                one = TableRuns(table)
            self._known[seq] = one
            blocks -= one.read(blocks)
            if one.complete and one.count <= runs:
                runs -= one.count
                found.append(one.pack(seq))
            else:
                left_out += 1
        return found, left_out


class PoolPublisher:
    """Writes the newest snapshot to Redis.  Belongs to the bus thread; offer() is for the loop's thread."""

    def __init__(self, engine: str, loop: asyncio.AbstractEventLoop) -> None:
        self.wanted = False  # a gateway watches; the bus thread sets it after each sync
        self._engine, self._loop = engine, loop
        self._newest: PoolSnapshot | None = None
        self._wake = asyncio.Event()

    def offer(self, snapshot: PoolSnapshot) -> None:
        """Have this snapshot written.  One that still waits is dropped.  Never blocks."""
        self._newest = snapshot
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self, store: PoolStateStore) -> None:
        """Write snapshots for ever."""
        state: PoolState | None = None
        failing = False
        while True:
            try:
                async with asyncio.timeout(REPEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            newest, self._newest = self._newest, None
            if not self.wanted:
                state = None
                continue
            state = newest.describe(self._engine) if newest is not None else state
            if state is None:
                continue
            try:
                await store.write(state)
                failing = False
            except Exception as error:  # the next one follows; syncs report that Redis is away
                if not failing:
                    log.warning("could not publish the state of %d blocks: %s", state.blocks, error)
                failing = True


class PoolObserver:
    """Observer that takes snapshots while a gateway watches."""

    def __init__(self, core: Scheduler, publisher: PoolPublisher, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, as in TurnRecord.marks."""
        self._core, self._publisher, self._clock = core, publisher, clock
        self._tables = TableReader()
        self._due = 0.0  # monotonic seconds of the next snapshot; 0: none was taken since a gateway watches

    def observe(self, record: TurnRecord) -> None:
        if not self._publisher.wanted:
            if self._due:
                self._due = 0.0
                self._tables.clear()
            return
        now = record.marks[-1]
        if now >= self._due:
            began = self._clock()
            self._publisher.offer(self.snapshot())
            self._due = now + max(PERIOD_S, (self._clock() - began) / MOST_SHARE)

    def snapshot(self) -> PoolSnapshot:
        """Copy the present state.  Call it between two plans, on the loop's thread."""
        host = self._core.swapping.host
        refs, sealed = copy_counts(self._core.pool)
        sequences, left_out = self._tables.read(self._core.live())
        return PoolSnapshot(refs, sealed, sequences, left_out, host.total, host.total - host.available)


def copy_counts(pool: BlockPool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return copies of every block's references, and of whether the prefix index has it."""
    refs, sealed = pool.views()
    return np.array(refs, dtype=np.int32), np.array(sealed, dtype=np.uint8)
