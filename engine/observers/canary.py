"""The canary: a fixed prompt that an idle engine computes periodically and compares with its first result.

    free blocks of the pool ──> two steps of the executor ──> top-k tokens after each step
            ^                                                        │
            └── freed, never in the prefix cache           equal to the first run's tokens?

Device memory may be corrupted after the start, and a kernel may fail on a hot GPU.  Nothing else would detect this,
because every answer would still be a text.  Checksums of files cannot detect corruption of loaded weights.

The first run is the reference, at the engine's first idle time, so errors from before it are not detected.  The second
step reads the keys and values that the first step wrote, over a block table of two blocks.

A difference is counted, logged and alerted; it does not end the engine, because it is no proof of an error: a new
driver or clock rate may change roundings on all engines, which would then all end at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Slice, Start, StepPlan
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import Executor, StepError

log = logging.getLogger("quire.engine")

QUIET_S = 1.0  # seconds that the engine must have been idle, so that no run falls between two requests of a client
MOST_SHARE = 0.005  # maximum fraction of the time for the canary; runs of a slow model are further apart
TOP_TOKENS = 8  # number of top-k tokens whose log-probabilities are compared after each step
TAIL = 3  # number of tokens of the first step that are in the second block
SLOT = 0  # slot of the canary in the batch; an idle engine uses no slot
# Nats.  Two runs differ only in their blocks, and on a GPU perhaps in whether a CUDA graph launches the kernels.
# Neighbouring bfloat16 logits from 16 to 32 differ by 0.125, so another order of summation changes a log-probability by
# at most two such steps.  On a CPU the runs are equal bit for bit.  If a top token leads by twice the tolerance, a
# change within the tolerance cannot replace it.
TOLERANCE = 0.25

Answer = list[dict[int, float]]  # per step: token id -> log-probability, for the top tokens


class CanaryCounts(msgspec.Struct):
    """Counts of canary runs since start, for the metrics."""

    equal: int = 0  # runs with equal results, the first run included
    different: int = 0  # runs with different results
    failed: int = 0  # runs whose step failed
    seconds: float = 0.0  # total seconds of all runs
    difference: float = 0.0  # maximum difference in the last run, nats; inf: logits were not finite


class Canary:
    """Computes the fixed prompt and compares the results.  Only the loop's thread uses it, between two turns."""

    def __init__(
        self,
        config: EngineConfig,
        core: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: monotonic seconds.  The canary is off if the executor cannot report candidates, or if a prompt of a
        block and TAIL + 1 tokens does not fit the context, a step or the pool."""
        self.counts = CanaryCounts()
        self._core, self._executor, self._clock = core, executor, clock
        size, limits = core.pool.block_size, core.limits
        self._tokens = [(7919 * at + 13) % limits.vocab_size for at in range(size + TAIL + 1)]
        fits = len(self._tokens) <= min(limits.max_model_len, limits.step_tokens) and core.pool.total >= 2
        top = min(TOP_TOKENS, limits.vocab_size)
        self._pieces = [(0, self._tokens[:-1], top), (size + TAIL, self._tokens[-1:], top)]
        self.every_s = config.canary_every_s if executor.info.beams and fits else 0.0  # 0: off
        self._first: Answer | None = None
        self._idle_since = math.inf
        self._due_at = 0.0

    def due(self, *, idle: bool) -> bool:
        """Return whether a run is due.  `idle`: the engine has no request, and had none in the last turn."""
        if not self.every_s or not idle:
            self._idle_since = math.inf
            return False
        now = self._clock()
        self._idle_since = min(self._idle_since, now)
        return now >= max(self._due_at, self._idle_since + QUIET_S) and self._has_blocks()

    def run(self) -> None:
        """Compute the prompt in two steps, and compare the result with the first run.  Raises ExecutorLost."""
        counts, began, why = self.counts, self._clock(), ""
        try:
            answer = self._compute()
            self._first = self._first or answer
            counts.difference = difference(self._first, answer)
            if counts.difference > TOLERANCE:
                counts.different += 1
                why = f"log-probabilities differ by up to {counts.difference:g} nats from the first run's"
            else:
                counts.equal += 1
        except StepError as error:
            counts.failed += 1
            why = f"its step failed: {error}"
        took = self._clock() - began
        counts.seconds += took
        self._due_at = began + max(self.every_s, took / MOST_SHARE)
        if why:
            log.error("canary: %s; answers may be wrong: drain this engine and check its device's memory", why)

    def _has_blocks(self) -> bool:
        pool = self._core.pool
        return pool.available >= len(self._pieces)

    def _compute(self) -> Answer:
        """Return the top tokens with log-probabilities after each step; an empty dict if the logits are not finite."""
        pool, answer, windows = self._core.pool, Answer(), self._core.builder.layers.pools
        table, tables = pool.allocate(2), [pool.allocate(2) for pool in windows]
        named = [pool.ids(own) for pool, own in zip(windows, tables, strict=True)]
        edits = [(SLOT, at, block) for ids in named for at, block in enumerate(ids)]
        try:
            for start, tokens, top in self._pieces:
                # The scheduler frees these slots in its next plan, too; freeing a slot twice is harmless.
                first = start == 0
                self._executor.submit(
                    StepPlan(
                        0,
                        freed_slots=self._core.batch.slots.vacated if first else [],
                        starts=[Start(SLOT, table)] if first else [],
                        edits=edits if first else [],
                        slices=[Slice(SLOT, start, tokens, candidates=top)],
                    )
                )
                ids, logprobs = self._executor.collect().candidates.get(SLOT, ([], []))
                answer.append(dict(zip(ids, logprobs, strict=True)))
        finally:
            for owner, own in zip((pool, *windows), (table, *tables), strict=True):
                owner.release(own)
        return answer


def difference(first: Answer, now: Answer) -> float:
    """Return the maximum difference of log-probabilities, nats; inf if one of the answers has no finite logits.

    A token that only one answer lists counts with the lowest log-probability of the other answer, an upper bound."""
    greatest = 0.0
    for one, other in zip(first, now, strict=True):
        if not one or not other:
            return math.inf
        least = min(one.values()), min(other.values())
        for token in one.keys() | other.keys():
            greatest = max(greatest, abs(one.get(token, least[0]) - other.get(token, least[1])))
    return greatest
