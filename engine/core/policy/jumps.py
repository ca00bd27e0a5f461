"""Jump costs: whether jump-forward decoding, several forced tokens as one slice (chunk) of a step, saves more time than
it adds to the step.

A jump adds a slice to a decode step, which makes the step longer for every sequence in it.  On a GPU such a step runs
other kernels, and large batches run without a CUDA graph, so a jump of four tokens may double the step's time.

    decode step       D seconds for n sequences        one token of one sequence is worth D / n
    step with jumps   D + extra seconds                saves D / n per token that it jumps over

So jumps save time if tokens * D / n > extra.  The plan has jumps only if they save GAIN times the extra time, because
every sequence waits for the longer step, few sequences jump, and a batch ends with its slowest sequence.  The extra
time depends on the device, the model and n, so it is measured.

Looking for forced tokens takes some microseconds of host time per sequence with a grammar.  After PATIENCE plans in
which jumps would have cost more than they save, the next REST plans look for none.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.core.policy.step_cost import FRESH, OUTLIER, StepCostModel

READINGS = 4  # number of steps with jumps to measure before any jump is refused
GAIN = 2.0  # minimum ratio of saved time to extra time
PATIENCE = 16  # consecutive plans in which jumps were too expensive, before the search for forced tokens pauses
REST = 256  # plans without the search; afterwards one step with jumps is measured again


@dataclass(slots=True)
class _Size:
    """Measurements of steps whose numbers of sequences have the same bit length."""

    extra_s: float = 0.0  # moving average of the seconds that jumps add to a step
    readings: int = 0  # measured steps with jumps
    refused: int = 0  # plans in which jumps were too expensive, since the last jumps or the last pause
    rest: int = 0  # remaining plans without a search for forced tokens
    again: bool = False  # measure one step with jumps after the pause


class JumpCosts:
    """Measures the time that jumps add to a step, per bit length of its sequence count.  Every method takes O(1)."""

    def __init__(self, step_cost: StepCostModel) -> None:
        self._step_cost = step_cost
        self._sizes: dict[int, _Size] = {}  # measurements by bit length of the number of sequences

    def record(self, seconds: float, seqs: int) -> None:
        """Learn from the time of a step with jumps and no prompts.  `seqs`: sequences that decode or jump in it."""
        self._step_cost.mixed_steps += 1
        if not (alone := self._step_cost.decode_s(seqs)):
            return
        size, extra = self._size(seqs), max(0.0, seconds - alone)
        if not size.readings:
            size.extra_s = extra
        size.extra_s += FRESH * (min(extra, OUTLIER * max(size.extra_s, alone)) - size.extra_s)
        size.readings += 1

    def pay(self, tokens: int, seqs: int) -> bool:
        """Return whether a step of `seqs` sequences should have jumps.  `tokens`: tokens saved by all of its jumps."""
        size = self._size(seqs)
        gain = tokens * self._step_cost.decode_s(seqs) / max(1, seqs)
        if size.readings < READINGS or gain > GAIN * size.extra_s or (size.again and not size.rest):
            size.refused, size.again = 0, False
            return True
        size.refused += 1
        if size.refused == PATIENCE:
            size.refused, size.rest, size.again = 0, REST, True
        return False

    def look_ahead(self, seqs: int, prompts: bool) -> bool:
        """Return whether a step should search for forced tokens; call it once per step.

        `prompts`: prompts are in prefill, so that the next steps have slices, and jumps add little."""
        size = self._size(seqs)
        if not size.rest:
            return True
        size.rest -= 1
        return prompts

    def _size(self, seqs: int) -> _Size:
        return self._sizes.setdefault(seqs.bit_length(), _Size())
