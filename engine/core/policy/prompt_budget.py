"""Prompt tokens of a step: the budget next to decoding sequences, and its division between short and long prompts.

Prompts advance in the order of their starts, each with all tokens that the step has left.  A long one is the exception:

    step budget   |  short prompts, and those that start now  |  long prompts, in the order of their starts  |
                  |  a fifth at most, what they leave goes to ->

So a prompt that arrives behind a long one starts in the next step.  The long one keeps four fifths of its pace.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.core.batch import Batch
from quire.engine.core.limits import Limits
from quire.engine.core.policy.step_cost import FIRST, StepCostModel
from quire.engine.core.sequence import Sequence

LONG_STEPS = 2  # steps of its own that a long prompt still needs at least; a shorter one is soon out of the way
SHORT_SHARE = 0.2  # fraction of a step's prompt tokens for prompts that are not long


def prompt_budget(limits: Limits, step_cost: StepCostModel, batch: Batch, waiting: int, behind: int) -> int:
    """Return the minimum of three bounds: the token budget, the aimed step time, and the stretch of a decode step.

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


def split_by_length(started: Iterable[Sequence], budget: int) -> tuple[list[Sequence], list[Sequence]]:
    """Return (short, long), each in the order given.  A long prompt needs more than LONG_STEPS steps of `budget`
    tokens.  O(prompts that have started)."""
    short, long = list[Sequence](), list[Sequence]()
    for seq in started:
        (long if seq.known - seq.computed > LONG_STEPS * budget else short).append(seq)
    return short, long
