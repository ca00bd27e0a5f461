"""How many prompt tokens an engine claims at once from the shared queue, of those that fit its KV cache.

    shared queue: lanes, fairness, priority ──claim──> prompts of this engine, in order of arrival ──> first tokens
                  '-- requests that wait here can still be overtaken, and leave the on-time lane --'

What is claimed is computed in the order of its claim, whatever arrives later.  If prompts are slow, the KV cache has
room for more of them than can be computed within the target of the time to first token.  So an engine claims what its
next steps compute, and no more.  At least one prompt is claimed when none is left to compute, however long it is.
"""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.waiting_queue import WaitingQueue

STEPS = 2  # steps whose prompt tokens are claimed ahead: the next sync with the queue comes with the next step
SECONDS = 0.2  # seconds of steps whose prompt tokens are claimed ahead, if these are more steps: claims need no haste
MEMORY = 8  # claimed requests whose prompts count in the usual length


class Claims:
    """Knows what waits in the shared queue and what is claimed and not computed yet."""

    def __init__(self, step_cost: StepCostModel, batch: Batch, waiting: WaitingQueue, adapters: AdapterSlots) -> None:
        self.queued = 0  # requests that wait in the shared queue: this engine's share of them
        self._step_cost, self._batch, self._waiting, self._adapters = step_cost, batch, waiting, adapters
        self._usual = 1.0  # tokens of a claimed prompt: a moving average

    def note(self, prompt_tokens: int) -> None:
        """Take note of a request that was claimed."""
        self._usual += (prompt_tokens - self._usual) / MEMORY

    def fitting(self, room_tokens: int) -> int:
        """Return how many of the queued requests would start, had they been claimed: an estimate."""
        return min(self.queued, int(room_tokens / max(1.0, self._usual)))

    def at_once(self, budget: int) -> int:
        """Return how many prompt tokens to claim now.  `budget`: prompt tokens that the next step may have."""
        batch = self._batch
        step_s = self._step_cost.decode_s(batch.decoding) + budget * self._step_cost.token_s
        steps = max(STEPS, SECONDS / step_s) if step_s else STEPS
        return max(0, int(budget * steps) - self.pending)

    @property
    def pending(self) -> int:
        """Prompt tokens that are claimed and not computed yet, without those that wait for an adapter slot.

        O(prompts that have started)."""
        waiting = self._waiting.tokens - self._adapters.blocked_tokens
        return waiting + sum(seq.known - seq.computed for seq in self._batch.prefilling)
