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
from typing import TYPE_CHECKING

from engine.core.blocks import AccountingError, DoubleFree
from engine.core.sequence import Sequence, State

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

SAMPLE = 16  # blocks, and places among the free ones, that one sample looks at
OWNERS = 4  # blocks of a sequence whose owners it counts


class Auditor:
    """Looks, never mends.  To be called between two plans: within one, tables and counts move one after another."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._at = 0  # samples so far

    def whole(self) -> None:
        """Every block against every table, every table against its sequence.  Raises BooksError, naming it."""
        core = self._core
        core.totals.audits += 1
        live = list(core.live())
        core.pool.check([seq.table for seq in live])
        for seq in live:
            self._sequence(seq)
        core.swapping.check(live)
        self._counts(live)

    def sample(self) -> None:
        """A part of that.  Raises BooksError, naming what is wrong."""
        core, pool = self._core, self._core.pool
        core.totals.audits += 1
        live = list(core.live())
        pool.balance(sum(len(seq.table) for seq in live))
        core.swapping.host.balance(sum(len(seq.host) for seq in live))
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
        core = self._core
        size, name = core.pool.block_size, seq.request.id
        computed = seq.computed_before(core.step + 1)
        if seq.state is not State.WAITING:
            want = -(-(seq.limit if core.limits.allocation == "static" else computed) // size)
            if len(seq.table) != want:
                raise AccountingError(f"{name}: {computed} tokens computed in {len(seq.table)} blocks, not {want}")
        elif seq.table:
            raise AccountingError(f"{name} waits and holds {len(seq.table)} blocks")
        want = -(-seq.computed // size) if seq.state is State.WAITING else 0
        if len(seq.host) != want:
            raise AccountingError(f"{name}, {seq.state.value}, holds {len(seq.host)} host blocks, not {want}")

    def _counts(self, live: list[Sequence]) -> None:
        """What is counted beside the sequences themselves."""
        core = self._core
        if core.waiting_tokens != sum(seq.queued_tokens for seq in core.waiting):
            raise AccountingError(f"{core.waiting_tokens} tokens are counted as waiting")
        reserved = sum(core.outlook.greatest(seq) for seq in live if seq.row >= 0 or seq.state is State.PAUSED)
        if reserved != core.reserved_blocks:
            raise AccountingError(f"{reserved} blocks would be reserved, {core.reserved_blocks} are counted")
        decoding = sum(seq.state is State.DECODING for seq in live)
        if decoding != core._decoding:
            raise AccountingError(f"{decoding} sequences decode, {core._decoding} are counted")
        taken = sum(seq is not None for seq in core._seats)
        if taken + len(core._free_rows) != core.limits.max_seqs:
            raise AccountingError(f"{taken} rows taken and {len(core._free_rows)} free of {core.limits.max_seqs}")

    def _table(self, seq: Sequence, live: Iterable[Sequence]) -> None:
        """As many tables name its blocks as are counted.  Who shares a block has it at the same place."""
        pool = self._core.pool
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
