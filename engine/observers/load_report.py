"""Builds the EngineLoad that gateways read: the scheduler's state and the engine's measured rates."""

from __future__ import annotations

import math
from typing import Any

from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import ADAPTERS, LATER_FIELDS, LEAVES_ADAPTERS, PREDICTIONS, EngineLoad


class Rate:
    """Growth of a count per second, averaged over the time in which requests wait: the rate at full load.

    An exponential moving average with time constant `seconds` of waiting time; 0: no request has waited yet.  An
    average over all time would be low for an engine with few requests, and gateways would refuse a burst."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._count = 0
        self._at: float | None = None  # time of the last update; None: no request waited at that time
        self._weight = 0.0  # total weight of all samples in `value`, which approaches 1
        self.value = 0.0

    def update(self, count: int, now: float, *, queued: bool) -> float:
        """Update with `count` at time `now` (monotonic seconds), and return the rate.  `queued`: requests wait now.

        An interval counts only if requests wait at its beginning and at its end."""
        if queued and self._at is not None and now > self._at:
            elapsed = now - self._at
            new = 1 - math.exp(-elapsed / self._seconds)
            self._weight += new * (1 - self._weight)
            self.value += new / self._weight * ((count - self._count) / elapsed - self.value)
        self._at, self._count = now if queued else None, count
        return self.value


class Pace:
    """Average time between the ends of two steps in seconds, without idle time: a plain mean at first, then a moving
    average."""

    STEPS = 32  # time constant of the moving average, in steps

    def __init__(self) -> None:
        self._last: float | None = None
        self._seen = 0
        self.value = 0.0  # average seconds; 0: unknown

    def step(self, now: float) -> float:
        """Record the end of a step at `now` (monotonic seconds).  Returns the seconds it took; 0 after a pause."""
        took = 0.0
        if self._last is not None:
            took = now - self._last
            self._seen = min(self._seen + 1, self.STEPS)
            self.value += (took - self.value) / self._seen
        self._last = now
        return took

    def pause(self) -> None:
        """Exclude the time until the next step from the average."""
        self._last = None


FILLED_S = 1.0  # minimum seconds between two counts of filled KV positions, which visit every sequence


def slots_filled(core: Scheduler) -> float:
    """Return the fraction of the KV positions in allocated blocks that hold a token; 0: no block is allocated.
    O(sequences)."""
    slots = (core.pool.total - core.pool.available) * core.pool.block_size
    return 1 - core.occupancy.wasted_positions() / slots if slots else 0.0


class LoadReport:
    """Measures rates over turns, and builds the EngineLoad."""

    def __init__(self, engine_id: str, info: ModelInfo) -> None:
        self._engine_id, self._info = engine_id, info
        self._tokens_rate, self._blocks_rate = Rate(), Rate()
        self._slots_filled, self._filled_at = 0.0, -math.inf
        self.pace = Pace()

    def describe(
        self, core: Scheduler, now: float, *, draining: bool, queued: bool, gated: tuple[int, int] = (0, 0)
    ) -> EngineLoad:
        """Return the load at `now` (monotonic seconds).  A draining engine reports no preemptible tokens.

        `queued`: requests are queued.  `gated`: (sequences, prompt tokens) that wait for a grammar or adapter."""
        info, pool, totals, calibration = self._info, core.pool, core.report.totals, core.admission.forecast.calibration
        if now - self._filled_at >= FILLED_S:
            self._slots_filled, self._filled_at = slots_filled(core), now
        over_share, preemptible_tokens, own = ([], 0, {}) if draining else core.headroom.yielding()
        return EngineLoad(
            engine=self._engine_id,
            model=info.name,
            fingerprint=info.fingerprint,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            block_size=pool.block_size,
            total_blocks=pool.total,
            free_blocks=pool.available,
            cached_blocks=pool.idle,
            running=core.running,
            waiting=len(core.waiting) + gated[0],
            waiting_tokens=core.waiting.tokens + gated[1],
            time_ms=steady_ms(),
            tokens_per_s=self._tokens_rate.update(totals.generated_tokens, now, queued=queued),
            blocks_per_s=self._blocks_rate.update(totals.released_blocks, now, queued=queued),
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            cached_prompt_tokens=totals.cached_prompt_tokens,
            generated_tokens=totals.generated_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            draining=draining,
            predicted_peak_blocks=core.headroom.predicted_peak(),
            step_s=self.pace.value,
            swapped=core.swapping.sequences,
            swap_preemptions=totals.swap_preemptions,
            swapped_out_bytes=totals.swapped_out_blocks * core.limits.block_bytes,
            swapped_in_bytes=totals.swapped_in_blocks * core.limits.block_bytes,
            paused=core.paused,
            pauses=totals.pauses,
            length_calibration=calibration.table(),
            peaks_judged=calibration.peaks,
            peaks_passed=calibration.peaks_passed,
            peaks_bound_blocks=calibration.bound_blocks,
            peaks_blocks=calibration.peak_blocks,
            audits=totals.audits,
            alarms=totals.leaks + totals.double_frees + totals.other_alarms,
            yields=totals.yields,
            over_share=over_share,
            preemptible_tokens=preemptible_tokens,
            preemptible_tokens_of=own,
            eos_ids=info.eos_ids,
            grammars=info.grammars,
            static_blocks=core.batch.reserved_blocks,
            slots_filled=self._slots_filled,
            honours=_honoured(core),
            adapters=core.adapters.resident,
            beams=core.limits.max_seqs if core.limits.beams else 0,
            **_steps_saved(core),
        )


def _steps_saved(core: Scheduler) -> dict[str, Any]:
    """Return the EngineLoad fields about drafts and forced tokens; no draft sources if no sequence can draft."""
    totals = core.report.totals
    sources = totals.drafted_tokens.items() if core.drafts.drafter is not None else ()
    return {
        "drafts": {name: (computed, totals.accepted_drafts[name]) for name, computed in sources},
        "refused_drafts": totals.refused_drafts,
        "jumped_tokens": totals.jumped_tokens,
    }


def _honoured(core: Scheduler) -> list[str]:
    """Return the newer request fields that this engine supports; engines of earlier releases ignore such fields."""
    later = [*LATER_FIELDS, ADAPTERS if core.adapters.count else LEAVES_ADAPTERS]
    if core.drafts.drafter is not None:
        later.append(PREDICTIONS)
    return later
