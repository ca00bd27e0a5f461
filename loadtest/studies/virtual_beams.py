"""Beam searches on the scheduler's virtual clock.  Forks of the beams are drawn at random.

Beams share the blocks up to their last common token, so sharing depends on how often a beam has several children.  A
drawn candidate's log-probability is lower than that of the one before it by an exponential variable of mean 1, and the
first of a beam is -SPREAD times such a variable: the larger SPREAD, the more beams descend from few.  With SPREAD six
beams of ShareGPT's lengths save 76 % of their blocks, as the demo model's do (`loadtest/results/sharing.json`); short
texts of the demo model save fewer than drawn ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.core.scheduler import Scheduler
from quire.engine.tools.simulate import Report, Script, Simulation, engine_limits
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import EOS, Job
from quire.engine.wire.messages import Beams, Generate

SPREAD = 0.01
ENDED = -1e3  # log-probability of the other candidates where every beam ends


class BeamScript(Script):
    """An executor that draws the candidates of beams; all beams of a job end at its output_len."""

    def __init__(self, jobs: Sequence[Job], core: Scheduler, blocks: int, spread: float) -> None:
        super().__init__(jobs, blocks)
        self._jobs_of, self._core, self._spread, self._rng = jobs, core, spread, random.Random(len(jobs))
        self._asked: deque[list[tuple[int, int, bool]]] = deque()  # per step: (slot, candidates, whether the beam ends)

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        slots = {seq.slot: seq for seq in self._core.live()}
        asked = []
        for piece in plan.slices:
            if piece.candidates:
                seq = slots[piece.slot]
                produced = piece.start + len(piece.token_ids) - seq.prompt_len
                asked.append(
                    (piece.slot, piece.candidates, produced + 1 == self._jobs_of[int(seq.request.id)].output_len)
                )
        self._asked.append(asked)

    def collect(self) -> StepResult:
        rows = {slot: self._row(count, ends=ends) for slot, count, ends in self._asked.popleft()}
        return msgspec.structs.replace(super().collect(), candidates=rows)

    def _row(self, count: int, *, ends: bool) -> tuple[list[int], list[float]]:
        tokens = list(range(1, count + 1))
        if ends:
            return [EOS, *tokens[:-1]], [0.0] + [ENDED] * (count - 1)
        logprob, found = -self._spread * self._rng.expovariate(1.0), []
        for _ in tokens:
            found.append(logprob)
            logprob -= self._rng.expovariate(1.0)
        return tokens, found


class BeamSimulation(Simulation):
    """A run of beam searches of a job's `n` beams."""

    def __init__(self, jobs: Sequence[Job], core: Scheduler, blocks: int, spread: float) -> None:
        super().__init__(jobs, core, blocks)
        self.executor = BeamScript(jobs, core, blocks, spread)
        self.blocks_held = self.entries = 0  # sums over all steps: blocks held, entries of block tables

    def request(self, number: int, job: Job) -> Generate:
        return msgspec.structs.replace(super().request(number, job), beams=Beams(job.n, early_stopping=True))

    def prompt_tokens(self, plan: StepPlan) -> int:
        """A beam's token costs a row, as a sample's does."""
        return sum(len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1)

    def collect(self) -> None:
        super().collect()
        self.blocks_held += self.core.pool.total - self.core.pool.available
        self.entries += sum(len(seq.table) for seq in self.core.live())

    @property
    def saved(self) -> float:
        """Share of the blocks saved by sharing, as the study `sharing` counts it."""
        return 1 - self.blocks_held / self.entries


def simulate_beams(
    jobs: Sequence[Job],
    blocks: int,
    block_size: int,
    step_time: StepTime,
    *,
    max_seqs: int,
    step_tokens: int,
    spread: float = SPREAD,
) -> tuple[Report, float]:
    """Run beam searches with the default admission; return the report, and the share of blocks saved by sharing."""
    limits = engine_limits("forecast", max_seqs=max_seqs, step_tokens=step_tokens)
    core = Scheduler(
        BlockPool(blocks, block_size, caching=False), msgspec.structs.replace(limits, beams=True), HostPool()
    )
    run = BeamSimulation(jobs, core, blocks, spread)
    return run.to_the_end(step_time, 2), run.saved
