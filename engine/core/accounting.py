"""The full check of the block accounting: compares every block's reference count with all block tables.

A full check takes O(blocks), 0.1 s for 100,000 blocks.  So it runs in parts, and the engine runs steps between them.  A
check begins when the engine becomes idle, every few seconds while it is busy, and on demand.  Tests check all blocks at
once.

A wrong count is never harmless.  After a Leak, blocks cannot be used until a restart.  A DoubleFree lets two sequences
write into one block, which would mix the answers of two clients.
"""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import AccountingError, BlockPool
from quire.engine.core.checkpoints import CheckpointPolicy
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.open_requests import OpenRequests
from quire.engine.core.policy.allocation import AllocationPolicy
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue

PART_BLOCKS = 16_384  # blocks that one part of a check compares: 20 ms with 100,000 blocks in the pool


class Auditor:
    """Checks the accounting and repairs nothing.  Call it only between two plans: within a plan, counts disagree."""

    def __init__(
        self,
        pool: BlockPool,
        requests: OpenRequests,
        batch: Batch,
        waiting: WaitingQueue,
        swapping: Swapping,
        allocation: AllocationPolicy,
        report: SchedulerReport,
        checkpoints: CheckpointPolicy,
        layers: LayerGroups,
    ) -> None:
        self._pool, self._requests, self._batch, self._waiting = pool, requests, batch, waiting
        self._swapping, self._allocation, self._report = swapping, allocation, report
        self._checkpoints, self._layers = checkpoints, layers
        self._next = 0  # first block of the next part

    def restart(self) -> None:
        """Let the next part be the first one of a new full check."""
        self._next = 0

    def part(self) -> bool:
        """Run the next part of a full check.  Returns whether it was the last one.  Raises AccountingError.

        A part compares PART_BLOCKS blocks with the present tables; the last part also checks all sequences.  So an
        error that lasts for a full check is found, whatever the steps between the parts change."""
        first, self._next = self._next, self._next + PART_BLOCKS
        live = list(self._requests.live())
        try:
            self._pool.check([seq.table for seq in live], range(first, min(self._next, self._pool.total)))
            if self._next < self._pool.total:
                return False
            self._sequences(live)
        except AccountingError:
            self._end()
            raise
        self._end()
        return True

    def whole(self) -> None:
        """Check every block against every table, and every table against its sequence.

        Raises AccountingError, which names the block or the sequence."""
        self._end()
        live = list(self._requests.live())
        self._pool.check([seq.table for seq in live])
        self._sequences(live)

    def _end(self) -> None:
        """Count a full check, and begin the next one at the first block."""
        self._report.totals.audits += 1
        self._next = 0

    def _sequences(self, live: list[Sequence]) -> None:
        """Check everything but the blocks of the pool.  Raises AccountingError."""
        for seq in live:
            self._sequence(seq)
        self._swapping.check(live)
        self._checkpoints.check(live)
        self._layers.check(live)
        self._waiting.check()
        self._batch.check(live)

    def _sequence(self, seq: Sequence) -> None:
        """Raise AccountingError unless the sequence has the blocks that its tokens need."""
        name, computed = seq.request.id, seq.computed_before(self._batch.step + 1)
        if seq.state is not State.WAITING:
            want = self._allocation.table_blocks(seq, computed + seq.drafts)
            if len(seq.table) != want:
                raise AccountingError(f"{name}: {computed} tokens computed in {len(seq.table)} blocks, not {want}")
        elif seq.table:
            raise AccountingError(f"{name} waits and holds {len(seq.table)} blocks")
        want = -(-seq.computed // self._pool.block_size) if seq.state is State.WAITING else 0
        if len(seq.host) != want:
            raise AccountingError(f"{name}, {seq.state.value}, holds {len(seq.host)} host blocks, not {want}")
