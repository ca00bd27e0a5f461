"""Audits of the scheduler's books: the whole, and samples that are cheap enough while tokens flow.

    whole    every block, every table: O(blocks), tens of milliseconds on a large GPU.  At idle, in tests, on demand
    sample   the sums; one sequence and who shares its blocks; a few blocks anywhere: O(sequences + its blocks)

What a sample looks at moves on from one to the next, so a wrong sum shows at once, and a wrong block or table after as
many samples as there are blocks (by SAMPLE) or sequences.  What only the whole sees: a free block whose place another
one has twice.

Every block ends up in somebody's arithmetic, so books that do not balance are never harmless: a Leak costs room until a
restart, a DoubleFree lets two sequences write into one block, which would mix two clients' answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.batch import Batch
from engine.core.blocks import AccountingError, BlockPool, DoubleFree
from engine.core.open_requests import OpenRequests
from engine.core.policy.allocation import AllocationPolicy
from engine.core.report import Report
from engine.core.sequence import Sequence, State
from engine.core.swapping import Swapping
from engine.core.waiting_queue import WaitingQueue

SAMPLE = 16  # blocks, and places among the free ones, that one sample looks at
OWNERS = 4  # blocks of a sequence whose owners it counts


class Auditor:
    """Looks, never mends.  Call it between two plans: within one, tables and counts move one after another."""

    def __init__(
        self,
        pool: BlockPool,
        requests: OpenRequests,
        batch: Batch,
        waiting: WaitingQueue,
        swapping: Swapping,
        allocation: AllocationPolicy,
        report: Report,
    ) -> None:
        self._pool, self._requests, self._batch, self._waiting = pool, requests, batch, waiting
        self._swapping, self._allocation, self._report = swapping, allocation, report
        self._at = 0  # samples so far

    def whole(self) -> None:
        """Check every block against every table, and every table against its sequence.

        Raises AccountingError, which names the block or the sequence."""
        self._report.totals.audits += 1
        live = list(self._requests.live())
        self._pool.check([seq.table for seq in live])
        for seq in live:
            self._sequence(seq)
        self._swapping.check(live)
        self._waiting.check()
        self._batch.check(live)

    def sample(self) -> None:
        """Check a part of that.  Raises AccountingError, which names what is wrong."""
        pool = self._pool
        self._report.totals.audits += 1
        live = list(self._requests.live())
        pool.balance(sum(len(seq.table) for seq in live))
        self._swapping.host.balance(sum(len(seq.host) for seq in live))
        for i in range(self._at * SAMPLE, (self._at + 1) * SAMPLE):
            pool.inspect(i % pool.total)
            pool.inspect_free(i)
        if live:
            seq = live[self._at % len(live)]
            self._sequence(seq)
            self._table(seq, live)
        self._at += 1

    def _sequence(self, seq: Sequence) -> None:
        """It has the blocks that its tokens need."""
        name, computed = seq.request.id, seq.computed_before(self._batch.step + 1)
        if seq.state is not State.WAITING:
            want = self._allocation.table_blocks(seq, computed)
            if len(seq.table) != want:
                raise AccountingError(f"{name}: {computed} tokens computed in {len(seq.table)} blocks, not {want}")
        elif seq.table:
            raise AccountingError(f"{name} waits and holds {len(seq.table)} blocks")
        want = -(-seq.computed // self._pool.block_size) if seq.state is State.WAITING else 0
        if len(seq.host) != want:
            raise AccountingError(f"{name}, {seq.state.value}, holds {len(seq.host)} host blocks, not {want}")

    def _table(self, seq: Sequence, live: Iterable[Sequence]) -> None:
        """As many tables name its blocks as are counted.  Who shares a block has it at the same place."""
        pool = self._pool
        if len(set(seq.table)) != len(seq.table):
            raise DoubleFree(f"{seq.request.id} has a block twice")
        for block in seq.table:
            if not pool.refs(block):
                raise DoubleFree(f"{seq.request.id} has block {block}, which nobody is counted to have")
            pool.inspect(block)
        for i in range(self._at * OWNERS, (self._at + 1) * OWNERS if seq.table else 0):
            place = i % len(seq.table)
            block = seq.table[place]
            pool.inspect(block, sum(place < len(other.table) and other.table[place] == block for other in live))
