"""Collects the block-table edits and the slices (tokens to compute) of the next step plan."""

from __future__ import annotations

from collections import Counter

from quire.engine.core.blocks import BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.plan import Fork, Slice, Start
from quire.engine.core.sequence import Sequence


class PlanEdits:
    """Starts, slices, forks and single table entries of one plan."""

    def __init__(self, pool: BlockPool, layers: LayerGroups) -> None:
        self._pool, self.layers = pool, layers
        self.starts: list[Start] = []
        self.slices: list[Slice] = []
        self.forks: list[Fork] = []
        self.sealed: list[int] = []  # blocks that entered the prefix index before this step writes them
        self.named: set[int] = set()  # ids of sequences in slices or forks: they cannot leave in the same plan
        self._growth: list[tuple[Sequence, int, int]] = []  # (sequence, table index, block)
        self._copies: list[tuple[Sequence, int, int]] = []  # (sequence, from, to)
        self._sources: Counter[int] = Counter()  # source block of copies -> references held until the plan is issued

    def grow(self, seq: Sequence, count: int) -> None:
        """Append `count` blocks to a table.  Raises OutOfBlocks."""
        for block in self._pool.allocate(count):
            self._growth.append((seq, len(seq.table), block))
            seq.table.append(block)
        self.layers.grow(seq, count)

    def set_entry(self, seq: Sequence, index: int, block: int) -> None:
        """Add one entry of a table to the plan, for the executor; the sequence's own table has it already."""
        self._growth.append((seq, index, block))

    def is_shared(self, block: int) -> bool:
        """Return whether more than one table contains the block; references of this plan's copies do not count."""
        return self._pool.refs(block) - self._sources[block] > 1

    def copy(self, seq: Sequence, index: int) -> None:
        """Replace one block of a table by a private copy.  Raises OutOfBlocks.

        `_sources` keeps the table's reference to the source block until the plan is issued.  Otherwise the block could
        be freed, allocated again, and become source and target of the same batch of copies."""
        source = seq.table[index]
        (seq.table[index],) = self._pool.allocate(1)
        self._sources[source] += 1
        self._copies.append((seq, source, seq.table[index]))
        self._growth.append((seq, index, seq.table[index]))
        self.layers.copy(seq, index)

    def copies_of(self, seq: Sequence) -> dict[int, int]:
        """Return a sequence's planned copies: target block -> source block, which still has the content."""
        return {target: source for owner, source, target in self._copies if owner is seq}

    def drop(self, seq: Sequence) -> None:
        """Drop the edits of a preempted sequence's table; the same plan may start the sequence again."""
        self._growth = [edit for edit in self._growth if edit[0] is not seq]
        self._copies = [copy for copy in self._copies if copy[0] is not seq]
        self.layers.drop(seq)

    def table_edits(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Return this plan's (copies, edits), as `StepPlan` has them."""
        copies = [(source, target) for _, source, target in self._copies]
        edits = [(seq.slot, index, block) for seq, index, block in self._growth]
        window_copies, window_edits, discarded = self.layers.edits()
        self._pool.discarded += discarded
        return copies + window_copies, edits + window_edits

    def take_sealed(self) -> list[int]:
        """Return the blocks sealed since the last plan that was issued."""
        sealed, self.sealed = self.sealed, []
        return sealed

    def clear(self) -> None:
        """Begin the next plan: release the sources of this plan's copies.  `sealed` stays until take_sealed()."""
        if self._sources:
            self._pool.release(list(self._sources.elements()))
            self._sources = Counter()
        self.layers.clear()
        self.starts, self.slices, self.forks, self.named = [], [], [], set()
        self._growth, self._copies = [], []
