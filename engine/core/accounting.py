"""Checks of the block accounting: the whole, and samples that are cheap enough while tokens flow.

    whole    every block, every table: O(blocks), tens of milliseconds on a large GPU; when idle, in tests, on demand
    sample   the sums; one sequence and the tables that share its blocks; a few other blocks: O(sequences + its blocks)

Each sample looks at the next blocks and the next sequence.  So it finds a wrong sum at once, and a wrong block or table
after as many samples as there are blocks (divided by SAMPLE) or sequences.  Only the whole finds a free block that is
missing from the free list while another one stands there twice.

A wrong count is never harmless.  A Leak costs room until a restart.  A DoubleFree lets two sequences write into one
block, which would mix the answers of two clients.
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

SAMPLE = 16  # blocks, and places in the free list, that one sample looks at
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
        """Raise AccountingError unless the sequence has the blocks that its tokens need."""
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
        """Raise AccountingError unless each block counts every table that contains it, at the same place."""
        pool = self._pool
        if len(set(seq.table)) != len(seq.table):
            raise DoubleFree(f"{seq.request.id} has a block twice")
        for block in seq.table:
            if not pool.refs(block):
                raise DoubleFree(f"{seq.request.id} has block {block}, which counts no reference")
            pool.inspect(block)
        for i in range(self._at * OWNERS, (self._at + 1) * OWNERS if seq.table else 0):
            place = i % len(seq.table)
            block = seq.table[place]
            pool.inspect(block, sum(place < len(other.table) and other.table[place] == block for other in live))
