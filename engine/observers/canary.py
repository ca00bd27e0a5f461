"""The canary: a fixed prompt that an engine computes periodically and compares with its first result.

    idle:  free blocks of the pool ──> two steps of the executor ──> top-k tokens after each step
                   ^                                                        │
                   └── freed, never in the prefix cache           equal to the first run's tokens?
                                                                            │
    busy:  a request among the others ──> scheduler ──> log-probabilities of its two tokens

Device memory may be corrupted after the start, and a kernel may fail on a hot GPU.  Nothing else would detect this,
because every answer would still be a text.  Checksums of files cannot detect corruption of loaded weights.

The first run is the reference, so errors from before it are not detected.  The second step reads the keys and values
that the first step wrote, over a block table of two blocks.

A step computes every decoding sequence, so a busy engine cannot run the canary's steps on their own: there the prompt
is a request (`LoadedCanary`), and both kinds of run compute the same log-probabilities.

A difference is counted, logged and alerted.  It does not end the engine, because it is no proof of an error: a new
driver may change rounding on all engines, which would then all end at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core.limits import Outputs
from quire.engine.core.plan import Slice, Start, StepPlan
from quire.engine.core.policy.fairness import ENGINE
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import Executor, StepError
from quire.engine.wire.messages import FOREVER_MS, PRIORITIES, Delta, Generate, Sampling

log = logging.getLogger("quire.engine")

QUIET_S = 1.0  # seconds that the engine must have been idle, so that no run falls between two requests of a client
MAX_SHARE = 0.005  # maximum fraction of the time for the canary; runs of a slow model are further apart
TOP_TOKENS = 8  # number of top-k tokens whose log-probabilities are compared after each step
TAIL = 3  # number of tokens of the first step that are in the second block
SLOT = 0  # slot of the canary in the batch; an idle engine uses no slot
# Nats.  Two runs differ only in their blocks, and on a GPU perhaps in whether a CUDA graph launches the kernels.
# Neighbouring bfloat16 logits from 16 to 32 differ by 0.125, so another order of summation changes a log-probability by
# at most two such steps.  On a CPU the runs are equal bit for bit.  If a top token leads by twice the tolerance, a
# change within the tolerance cannot replace it.
TOLERANCE = 0.25
FORCED = 1e6  # bias on the logit of the token that a busy engine must sample; log-probabilities are of raw logits
NAME = "(canary)"  # id of the canary's request, and the gateway of its deltas; no id or gateway has brackets

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
        self.loaded = LoadedCanary(self._tokens, top, core) if not executor.info.near_ties else None
        self._first: Answer | None = None
        self._idle_since = math.inf
        self._due_at = 0.0
        self._busy_due_at = clock() + self.every_s  # the first requests of a busy engine do not wait for the canary

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
        began = self._clock()
        try:
            answer, why = self._compute(), ""
        except StepError as error:
            answer, why = None, str(error)
        self._record(answer, why, began, self._clock() - began)

    def join(self) -> None:
        """Add the prompt to the requests of a busy engine, if a run is due."""
        if self.every_s and self.loaded and not self.loaded.running and (now := self._clock()) >= self._busy_due_at:
            self.loaded.begin(now)

    def take(self, outputs: Outputs) -> None:
        """Remove the deltas of the canary's request from `outputs`, and compare its answer when it has ended."""
        if self.loaded and self.loaded.running and (end := self.loaded.take(outputs)):
            answer, why, seconds = end
            self._record(answer, why, self.loaded.began, seconds or self._clock() - self.loaded.began)

    def _record(self, answer: Answer | None, failure: str, began: float, seconds: float) -> None:
        """Count a run that began at `began` and took `seconds`, and set the times of the next.

        `answer`: None if the run failed, for the reason `failure`."""
        counts, why = self.counts, ""
        if answer is None:
            counts.failed += 1
            why = f"its step failed: {failure}"
        else:
            self._first = self._first or answer
            counts.difference = difference(self._first, answer)
            if counts.difference > TOLERANCE:
                counts.different += 1
                why = f"log-probabilities differ by up to {counts.difference:g} nats from the first run's"
            else:
                counts.equal += 1
        counts.seconds += seconds
        self._due_at = self._busy_due_at = began + max(self.every_s, seconds / MAX_SHARE)
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


class LoadedCanary:
    """The canary of a busy engine: a request with the fixed prompt, and the log-probabilities of its answer.

    It starts before other waiting requests, and takes one slot and two KV blocks for two steps.  No sequence is
    preempted for it.  The token counters of the engine include its tokens."""

    def __init__(self, tokens: list[int], top: int, core: Scheduler) -> None:
        """`tokens`: the prompt and the token that must follow it."""
        self._prompt, self._core = tokens[:-1], core
        # A huge bias forces the token that the first step samples, so the second step has the input of the first run.
        self._sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=top, logit_bias=[(tokens[-1], FORCED)])
        self.running = False
        self.began = 0.0  # seconds of the caller's clock at the start of the last run
        self._runs = 0
        self._answer = Answer()

    def begin(self, now: float) -> None:
        """Queue the request in the scheduler, before all others.  `now`: seconds."""
        self.running, self.began, self._answer = True, now, Answer()
        self._runs += 1
        request = Generate(
            *(NAME, NAME, list(self._prompt), 2, self._sampling, FOREVER_MS),
            cache_salt=f"{NAME} {self._runs}",  # no run finds the blocks of an earlier run in the prefix cache
            tenant=ENGINE,
            priority=PRIORITIES[0],
        )
        self._core.accept(request)

    def take(self, outputs: Outputs) -> tuple[Answer | None, str, float] | None:
        """Remove the request from `outputs`.  At its end returns (answer, or None if it failed; why; seconds).

        The seconds are the time that the request added to two steps, as estimated by the step cost model; 0:
        unknown."""
        deltas = outputs.deltas.pop(NAME, [])
        outputs.events = [event for event in outputs.events if event.request.id != NAME]
        if NAME in outputs.finished:
            outputs.finished.remove(NAME)
            self.running = False
        for delta in deltas:
            self._answer += [dict(one.top) for one in delta.logprobs or ()]
        if self.running:
            return None
        failure = next((failure_of(delta) for delta in deltas if failure_of(delta)), "")
        complete = len(self._answer) == 2 and not failure
        return (self._answer if complete else None), failure or "its answer is incomplete", self._seconds()

    def _seconds(self) -> float:
        costs, rows = self._core.step_cost, self._core.running + 1
        return len(self._prompt) * costs.token_s + (costs.decode_s(rows) / rows if costs.token_s else 0.0)


def failure_of(delta: Delta) -> str:
    """Return why a request ended early; an empty string if it did not."""
    finish = delta.finish
    return "" if finish is None or finish.reason == "length" else finish.message or finish.reason


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
