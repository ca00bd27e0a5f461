"""Admission: when a waiting sequence may start, and how many blocks are free for requests of the shared queue.

If no other sequence runs, a sequence starts when its prompt fits.  Otherwise it must also meet the mode's condition:

    forecast    the predicted peak of all running sequences, the new one included, fits the pool
    threshold   the pool's utilisation stays at or below `admit_threshold`

One class per mode.  `register` adds a mode: `loadtest/studies/baselines.py` registers the modes that Quire is compared
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.policy.admission_forecast import AdmissionForecast
from quire.engine.core.policy.allocation import AllocationPolicy
from quire.engine.core.policy.growth import GrowthPolicy
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.waiting_queue import WaitingQueue

UNPRESSED = 4  # while at least 1/UNPRESSED of the pool is available, every sequence may grow
CROWDED = 4  # maximum paused sequences per running sequence before the largest one is preempted
PATIENCE = 128  # steps that CROWDED may be exceeded before that preemption
PRESSURE_SLOTS = 64  # under memory pressure, sequence sizes are sorted again every 1 + sequences / this number of steps


class AdmissionPolicy(Protocol):
    """Decides which sequences may start and grow; changes no sequence and no block itself."""

    forecast: AdmissionForecast  # in every mode, it learns output lengths and measures its own accuracy
    preempts: bool  # whether sequences may be preempted so that another tenant's sequence can start

    def blocks_to_start(self, seq: Sequence) -> int:
        """Return how many available blocks a start takes: new blocks, and cached blocks that no table references
        now."""

    def may_start(self, seq: Sequence) -> bool:
        """Return whether the head of the queue may start.  Slots for it and its siblings must be free."""

    def fits_without(self, seq: Sequence, need: int, gone: list[Sequence]) -> bool:
        """Return whether `seq` could start with `need` blocks if the sequences in `gone` were preempted."""

    def may_grow(self, seq: Sequence) -> bool:
        """Return True if a sequence may take its next block now; False: it pauses until other sequences end."""

    def sequence_to_preempt(self) -> Sequence | None:
        """Return a large sequence to preempt, because too many sequences are paused; None: no preemption."""

    def free_blocks(self, waiting: WaitingQueue) -> int:
        """Return the number of blocks that requests of the shared queue could take soon; 0 or less: none."""

    def predicted_peak(self) -> int:
        """Return the predicted peak KV usage of the running sequences if no other starts, in blocks."""

    def begin_starts(self) -> None:
        """Forget the sum of the sequences' KV-block demand that the previous plan computed."""

    def forget_sizes(self) -> None:
        """Let the next may_grow() sort the sizes of the running sequences again."""

    def judge_predictions(self, step: int) -> None:
        """Compare earlier predictions with the blocks that sequences hold at the end of `step`."""


class Unlimited:
    """Starts a sequence whenever its prompt fits.  Base class of all modes in which sequences grow block by block."""

    preempts = True

    def __init__(self, pool: BlockPool, limits: Limits, batch: Batch, allocation: AllocationPolicy) -> None:
        self.forecast = self._forecast(pool)
        self._pool, self._limits, self._batch, self._allocation = pool, limits, batch, allocation
        self._kept_free = self._blocks_kept_free()

    def blocks_to_start(self, seq: Sequence) -> int:
        hits = self._allocation.cached_prefix(seq)
        blocks = -(-(seq.known + 1) // self._pool.block_size)
        return blocks - len(hits) + self._pool.idle_among(hits)

    def may_start(self, seq: Sequence) -> bool:
        need = self.blocks_to_start(seq)
        if not self._allocation.may_hold(seq):
            return False
        if self._batch.running == 0:  # a single request may exceed the threshold; its siblings may pause for each other
            return need <= self._pool.available
        return need + seq.sibling_blocks <= self._spare() and self._start_fits(seq)

    def fits_without(self, seq: Sequence, need: int, gone: list[Sequence]) -> bool:
        if not self._allocation.may_hold(seq, gone):
            return False
        promised = sum(self._batch.blocks_to_take(s) for s in gone if s.state is State.PREFILLING)
        hits = self._allocation.cached_prefix(seq)  # `seq` will hold these blocks, so preemption does not free them
        if need > self._spare() + promised + self._pool.held_only_by([s.table for s in gone], hits):
            return False
        names = set(map(id, gone))
        return self._would_fit(seq, hits, (s for s in self._batch.holders() if id(s) not in names))

    def may_grow(self, seq: Sequence) -> bool:
        return True

    def sequence_to_preempt(self) -> Sequence | None:
        return None

    def free_blocks(self, waiting: WaitingQueue) -> int:
        if self._batch.paused:
            return 0
        return self._claimable() - (waiting.tokens // self._pool.block_size + len(waiting) + waiting.fork_blocks)

    def predicted_peak(self) -> int:
        return self.forecast.peak(self._batch.holders(), self._batch.step, self._batch.steps_in_flight)

    def begin_starts(self) -> None:
        self.forecast.forget_demand()

    def forget_sizes(self) -> None:
        pass

    def judge_predictions(self, step: int) -> None:
        self.forecast.watch(self._batch.holders(), step, self._batch.steps_in_flight)

    def _forecast(self, pool: BlockPool) -> AdmissionForecast:
        return AdmissionForecast(pool)

    def _blocks_kept_free(self) -> int:
        """Return how many blocks of the pool a start must leave free."""
        return 0

    def _spare(self) -> int:
        """Return how many blocks a new sequence may take now."""
        return self._pool.available - self._kept_free - self._batch.promised_blocks()

    def _claimable(self) -> int:
        """Return how many blocks are free for waiting requests, in this engine and in the shared queue."""
        return self._spare()

    def _start_fits(self, seq: Sequence) -> bool:
        """Return whether the mode allows a start for which enough blocks are free now."""
        return True

    def _would_fit(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence]) -> bool:
        """Return whether the mode would allow the start if only `holders` held blocks."""
        return True


class Threshold(Unlimited):
    """Keeps utilisation at or below `Limits.admit_threshold`."""

    def _blocks_kept_free(self) -> int:
        return self._pool.total - int(self._limits.admit_threshold * self._pool.total)


class PeakBound(Unlimited):
    """Base class of the modes that bound the predicted peak of all running sequences."""

    def free_blocks(self, waiting: WaitingQueue) -> int:
        # The forecast refused the first sequence of the queue, and a new request would wait behind it.
        if waiting and self.forecast.ask_again > self._batch.step:
            return 0
        return super().free_blocks(waiting)

    def _claimable(self) -> int:
        return min(self._spare(), self._pool.total - self.predicted_peak())

    def _start_fits(self, seq: Sequence) -> bool:
        hits, batch = self._allocation.cached_prefix(seq), self._batch
        return self.forecast.fits(seq, hits, batch.holders(), batch.step + 1, batch.steps_in_flight)

    def _would_fit(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence]) -> bool:
        return self.forecast.would_fit(seq, hits, holders, self._batch.step + 1, self._batch.steps_in_flight)


class Forecast(PeakBound):
    """Starts a sequence if the predicted peak fits the pool.  If the actual peak is higher, the smallest sequences
    pause."""

    def __init__(self, pool: BlockPool, limits: Limits, batch: Batch, allocation: AllocationPolicy) -> None:
        super().__init__(pool, limits, batch, allocation)
        self._sizes, self._sizes_step = GrowthPolicy(()), 0  # growth policy, and the step in which to rebuild it
        self._uncrowded = 0  # the last step with at most CROWDED paused sequences per running sequence

    def may_grow(self, seq: Sequence) -> bool:
        """Apply the growth policy under memory pressure.

        A sequence without stop tokens may always grow: the forecast admitted it with its exact final length."""
        if not seq.stops:
            return True
        left = self._pool.available - self._batch.promised_blocks() - 1
        if left >= self._pool.total // UNPRESSED:
            return True
        if self._sizes_step <= self._batch.step:
            size, growing = self._pool.block_size, [s for s in self._batch.holders() if s.stops]
            self._sizes = GrowthPolicy((len(s.table), s.max_blocks(size) - len(s.table)) for s in growing)
            self._sizes_step = self._batch.step + 1 + len(growing) // PRESSURE_SLOTS
        return left >= 0 and self._sizes.may_take(len(seq.table), left)

    def sequence_to_preempt(self) -> Sequence | None:
        """Return the largest running sequence, if many sequences have been paused for long while few run.

        Without the preemption it would get every free block until it ends, and the paused sequences would wait."""
        batch = self._batch
        if len(batch.paused) <= CROWDED * batch.running or batch.running == 0:
            self._uncrowded = batch.step
        if batch.step - self._uncrowded < PATIENCE:
            return None
        self._uncrowded = batch.step
        growing = [seq for seq in batch.holders() if seq.state is State.DECODING and seq.stops]
        return max(growing, key=lambda seq: len(seq.table), default=None)

    def forget_sizes(self) -> None:
        """Rebuild the growth policy in the next may_grow(), so that ended sequences do not count any more."""
        self._sizes_step = 0


Factory = Callable[[BlockPool, Limits, Batch, AllocationPolicy], AdmissionPolicy]
ADMISSION: dict[str, Factory] = {
    "forecast": Forecast,
    "threshold": Threshold,
}


def register(mode: str, factory: Factory) -> None:
    """Add an admission mode, or replace one, for schedulers built from now on."""
    ADMISSION[mode] = factory


def admission_policy(pool: BlockPool, limits: Limits, batch: Batch, allocation: AllocationPolicy) -> AdmissionPolicy:
    """Build the policy of the mode `limits.admission`.  Raises KeyError for a mode that is not registered."""
    return ADMISSION[limits.admission](pool, limits, batch, allocation)
