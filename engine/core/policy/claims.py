"""Claims: the prompt tokens that an engine claims at once from the shared queue, within its free KV cache.

    shared queue: lanes, fairness, priority ──claim──> prompts of this engine, in order of arrival ──> first tokens
                  '-- requests that wait here can still be overtaken, and leave the on-time lane --'

An engine computes claimed requests in the order of their claims, even if more urgent requests arrive later.  If prefill
is slow, more prompts fit the KV cache than can be computed within the TTFT target.  So an engine claims only the prompt
tokens of its next steps. (The on-time lane has the requests whose predicted wait meets the TTFT target.)  When no
prompt is left to compute, it claims at least one prompt of any length.
"""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.waiting_queue import WaitingQueue

STEPS = 2  # steps whose prompt tokens are claimed ahead: the engine syncs with the queue once per step
SECONDS = 0.2  # or the prompt tokens of this time, if that is more
MEMORY = 8  # window of the moving average of prompt lengths, in claimed requests


class Claims:
    """Computes how many prompt tokens to claim, from the claimed prompts that are not computed yet."""

    def __init__(self, step_cost: StepCostModel, batch: Batch, waiting: WaitingQueue, adapters: AdapterSlots) -> None:
        self.queued = 0  # this engine's share of the requests that wait in the shared queue
        self._step_cost, self._batch, self._waiting, self._adapters = step_cost, batch, waiting, adapters
        self._usual = 1.0  # moving average of the length of claimed prompts, tokens

    def note(self, prompt_tokens: int) -> None:
        """Add the prompt length of a claimed request to the moving average."""
        self._usual += (prompt_tokens - self._usual) / MEMORY

    def fitting(self, free_tokens: int) -> int:
        """Estimate how many of the queued requests could start if the engine had claimed them."""
        return min(self.queued, int(free_tokens / max(1.0, self._usual)))

    def at_once(self, budget: int, waiting_tokens: int | None = None) -> int:
        """Return how many prompt tokens to claim now.  `budget`: maximum prompt tokens of the next step.

        `waiting_tokens`: tokens of the waiting sequences that start before the claimed ones; None: of all of them."""
        batch = self._batch
        step_s = self._step_cost.decode_s(batch.decoding) + budget * self._step_cost.token_s
        steps = max(STEPS, SECONDS / step_s) if step_s else STEPS
        pending = self.pending if waiting_tokens is None else waiting_tokens + self._started
        return max(0, int(budget * steps) - pending)

    @property
    def pending(self) -> int:
        """Claimed prompt tokens that are not computed yet, except prompts that wait for an adapter slot.

        O(started prompts)."""
        return self._waiting.tokens - self._adapters.blocked_tokens + self._started

    @property
    def _started(self) -> int:
        return sum(seq.known - seq.computed for seq in self._batch.prefilling)
