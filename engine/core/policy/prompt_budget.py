"""Prompt budget: maximum prompt tokens of a step that also decodes, and their division between short and long prompts.

Prompts advance in the order of their starts, each with all tokens that the step has left, except long prompts:

    step budget   |  short prompts, and prompts that start now  |  long prompts, in the order of their starts  |
                  |  a fifth at most; the unused rest goes to ->

So a prompt that arrives after a long prompt starts in the next step, and the long prompt keeps 4/5 of its prefill
throughput.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.core.batch import Batch
from quire.engine.core.limits import Limits
from quire.engine.core.policy.step_cost import FIRST, StepCostModel
from quire.engine.core.sequence import Sequence

LONG_STEPS = 2  # a prompt is long if its uncomputed tokens would take more than this many full steps
SHORT_SHARE = 0.2  # fraction of a step's prompt tokens for prompts that are not long


def prompt_budget(limits: Limits, step_cost: StepCostModel, batch: Batch, waiting: int, behind: int) -> int:
    """Return the prompt tokens of the next step: the minimum of the token budget and the bounds on the step's time.

    `waiting`: sequences in the queue.  `behind`: reassigned sequences that have not been recomputed yet.  While there
    are any, the bound `itl_stretch` protects only sequences that began on this engine.  Otherwise the reassigned
    sequences that resumed first would delay the recomputation of the rest."""
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
    """Split started prompts into (short, long), in order: long prompts need more than LONG_STEPS steps of `budget`
    tokens.  O(started prompts)."""
    short, long = list[Sequence](), list[Sequence]()
    for seq in started:
        (long if seq.known - seq.computed > LONG_STEPS * budget else short).append(seq)
    return short, long
