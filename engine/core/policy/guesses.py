"""Guess costs: whether the checkpoint's draft head (MTP) saves more time than it takes.

The head runs after each step, for a guess of one token per sequence.  The draft controller decides whether to compute a
guess.  But the head's own time is spent before that, so it is weighed here:

    saved    accepted guesses * D(n) / n, minus the time that computing the guesses added to the steps
    spent    seconds of the head, as the executor measures them

If the head has saved less than it took in MEASURED steps, it rests for REST steps.  So it loses at most MEASURED / REST
of its share of a step.  Steps are counted per power of two of sequences, because a head that pays for one sequence may
not pay for 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.core.policy.step_cost import StepCostModel

MEASURED = 64  # steps with the head before it may rest
REST = 64 * MEASURED  # steps without the head


@dataclass(slots=True)
class _Size:
    """Steps whose numbers of sequences have the same bit length."""

    steps: int = 0  # steps with the head since the last decision
    balance_s: float = 0.0  # seconds saved minus seconds spent in these
    rest: int = 0  # remaining steps without the head


class GuessCosts:
    """Weighs the time of the head.  Every method takes O(1)."""

    def __init__(self, step_cost: StepCostModel, extra_s: Callable[[int, int], float]) -> None:
        """`extra_s`: estimated seconds that drafts add to a step, by (sequences, drafts)."""
        self._step_cost, self._extra_s = step_cost, extra_s
        self._sizes: dict[int, _Size] = {}

    def pay(self, seqs: int) -> bool:
        """Return whether the head should run in a step of `seqs` decoding sequences; call it once per step.

        A step of prompts alone counts as one of one sequence, for whose later guesses the head must see its prompt."""
        size = self._size(seqs)
        if not size.rest:
            return True
        size.rest -= 1
        return False

    def record(self, seconds: float, seqs: int, computed: int, guessed: int, accepted: int) -> None:
        """Learn from a step of `seqs` sequences, in which the head took `seconds`.

        The step computed `computed` drafts, `guessed` of them guesses of the head, and `accepted` of these were
        accepted."""
        size = self._size(seqs)
        saved = accepted * self._step_cost.exact_decode_s(seqs) / max(1, seqs)
        added = self._extra_s(seqs, computed) * guessed / computed if guessed else 0.0
        size.steps += 1
        size.balance_s += saved - added - seconds
        if size.steps >= MEASURED:
            size.rest = REST if size.balance_s < 0 else 0
            size.steps, size.balance_s = 0, 0.0

    def _size(self, seqs: int) -> _Size:
        return self._sizes.setdefault(max(1, seqs).bit_length(), _Size())
