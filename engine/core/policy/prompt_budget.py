"""How many prompt tokens a step may have in addition to the sequences that decode."""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.limits import Limits
from quire.engine.core.policy.step_cost import FIRST, StepCostModel


def prompt_budget(limits: Limits, step_cost: StepCostModel, batch: Batch, waiting: int, behind: int) -> int:
    """Return the least of three bounds: the token budget, the aimed step time, and the stretch of a decode step.

    `waiting`: sequences in the queue.  `behind`: reassigned sequences that have not been computed again yet.  All of
    them paused together when their engine died.  Until the last one resumes, the bound on the stretch protects only
    sequences that began here.  Otherwise those that resumed first would hold back the recomputing of the others."""
    budget = limits.step_tokens - batch.decoding
    if limits.step_target_s:
        within = step_cost.tokens_within(batch.decoding, limits.step_target_s)
        if within is None and not batch.committed:
            within = FIRST
        budget = budget if within is None else min(budget, within)
    if not batch.decoding or not limits.itl_stretch:
        return budget
    protected = batch.decoding_here() if behind else batch.decoding
    if not protected:
        return budget
    pending = len(batch.prefilling) + waiting
    stretched = step_cost.prompt_tokens(batch.decoding, pending, limits.itl_stretch, protected)
    return budget if stretched is None else min(budget, stretched)
