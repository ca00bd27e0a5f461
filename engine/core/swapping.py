"""Swapping: blocks of preempted sequences in host memory, and when a copy is cheaper than recomputing.

    runs --- preempted, a swap pays ---> swapped: no table, `host` lists host blocks --- blocks free again ---> runs
                                          |       (in the queue, ahead of sequences that never ran)
                                          +-- cancelled, deadline, step failed: the host blocks are freed

A swapped sequence keeps no block on the device.  The copy includes shared blocks, although other tables or the prefix
cache may still have them: a shared block could be evicted before the sequence resumes, and a reference kept on it
would let waiting sequences hold memory that running sequences need.  So a swapped sequence can always resume without
computing a token twice.  Blocks that are in the prefix cache at its resumption are shared instead of copied.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from quire.engine.core.blocks import AccountingError, BlockPool, HostPool
from quire.engine.core.checkpoints import CheckpointPolicy
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.sequence import Sequence

Preempt = Literal["recompute", "swap", "auto"]


class Swapping:
    """Owns the host blocks, the host tables of swapped sequences, and the swap copies of the plan being built."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        step_cost: StepCostModel,
        preempt: Preempt,
        block_bytes: int,
        checkpoints: CheckpointPolicy,
        layers: LayerGroups,
    ) -> None:
        """`block_bytes`: bytes of keys and values per block, all layers."""
        self.host = host
        self.sequences = 0  # sequences that are swapped out now
        self._pool, self._step_cost, self._preempt, self._block_bytes = pool, step_cost, preempt, block_bytes
        self._checkpoints, self._layers = checkpoints, layers
        self._out: list[tuple[int, int]] = []  # (block, host block)
        self._in: list[tuple[int, int]] = []  # (host block, block)

    @property
    def planned(self) -> bool:
        """Whether the plan being built has swap copies."""
        return bool(self._out or self._in)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return this plan's (swap_out, swap_in), and clear both."""
        copies, self._out, self._in = (self._out, self._in), [], []
        return copies

    def pays(self, seq: Sequence) -> bool:
        """Return whether to copy a preempted sequence's KV blocks to the host.

        True if enough host blocks are free and, in mode "auto", both copies take less time than recomputing.  The
        sequence must still have its table."""
        blocks = self._blocks(seq)
        room = 0 < blocks <= self.host.available and self._layers.fits_host(seq)
        if self._preempt == "recompute" or not room:
            return False
        if self._preempt == "swap":
            return True
        # Blocks that other tables share will be prefix-cache hits: they need neither copying back nor recomputing.
        shared = min(blocks, self._pool.shared_prefix(seq.table)) if self._pool.caching else 0
        again = max(0, seq.computed - shared * self._pool.block_size)
        return self._step_cost.swap_pays((2 * blocks - shared) * self._block_bytes, again)

    def swap_out(self, seq: Sequence, planned: Mapping[int, int]) -> int:
        """Plan the copy of a sequence's KV blocks to the host and release its table.  Returns the number of blocks.

        `planned`: copy-on-write copies that this plan would make, target block -> source block, which has the
        content."""
        blocks = [planned.get(block, block) for block in seq.table[: self._blocks(seq)]]
        seq.host = self.host.allocate(len(blocks))
        self._out += zip(blocks, seq.host, strict=True)
        self._out += self._layers.swap_out(seq)
        self._pool.release(seq.table)
        seq.table = []
        self.sequences += 1
        return len(blocks)

    def leaves(self, seq: Sequence) -> bool:
        """Return whether the plan being built swaps the sequence out."""
        return bool(seq.host) and any(block == seq.host[0] for _, block in self._out)

    def swap_in(self, seq: Sequence) -> int:
        """Plan the copies back for a sequence whose table already has its cached blocks.

        Returns the number of blocks copied.  Raises OutOfBlocks; nothing was allocated then."""
        hits = len(seq.table)
        rest = seq.host[hits:]
        blocks = self._pool.allocate(len(rest))
        seq.table += blocks
        self._in += self._layers.swap_in(seq, hits)
        seq.computed = max(seq.computed, hits * self._pool.block_size)
        self._in += zip(rest, blocks, strict=True)
        self._release_host(seq)
        return len(rest)

    def free_all_blocks(self, seq: Sequence) -> None:
        """Free every block of the sequence, on the device and on the host, and set `computed` to 0."""
        self._checkpoints.release(seq)
        self._layers.release(seq)
        self._pool.release(seq.table)
        self._release_host(seq)
        seq.table, seq.computed = [], 0

    def _release_host(self, seq: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any."""
        if seq.host:
            self.host.release(seq.host)
            seq.host = []
            self.sequences -= 1

    def check(self, live: Iterable[Sequence]) -> None:
        """Compare the host blocks and counts with all sequences.  Raises AccountingError."""
        live = list(live)
        self.host.check([seq.host for seq in live])
        if self.sequences != sum(bool(seq.host) for seq in live):
            raise AccountingError(f"{self.sequences} sequences are counted as swapped")

    def _blocks(self, seq: Sequence) -> int:
        return -(-seq.computed // self._pool.block_size)
