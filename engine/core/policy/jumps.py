"""Jump costs: whether a step in which sequences jump over forced tokens saves more time than it takes.

A jump turns a decode step into one with slices, which takes longer for every sequence in it.  On a GPU it launches
other kernels, a large batch without a CUDA graph, so that a jump of four tokens may double the step.

    decode step       D seconds for n sequences                    a row of it is worth D / n
    step with jumps   D + extra seconds                            it saves a row for each token that it jumps over

So jumps pay where tokens * D / n > extra.  They must pay GAIN times, because those who wait for the longer step are not
those who gain, and a batch ends with its slowest.  Extra is measured: it depends on the device, the model and n.
"""

from __future__ import annotations

from engine.core.policy.step_cost import FRESH, OUTLIER, StepCostModel

READINGS = 4  # steps with jumps that are measured before any is refused, for each power of two of sequences
GAIN = 2.0
AGAIN = 256  # so many refused plans later one is measured again: what made jumps slow may have passed


class JumpCosts:
    """Moving averages of what jumps add to a step, in seconds.  O(1) each."""

    def __init__(self, step_cost: StepCostModel) -> None:
        self._step_cost = step_cost
        self._extra_s: dict[int, float] = {}  # by bit length of the sequences that compute in the step
        self._readings: dict[int, int] = {}
        self._refused = 0  # plans since the last step with jumps

    def record(self, seconds: float, seqs: int) -> None:
        """Learn from a step with jumps, without prompts.  `seqs`: sequences that decode or jump in it."""
        self._step_cost.mixed_steps += 1
        if not (alone := self._step_cost.decode_s(seqs)):
            return
        size, extra = seqs.bit_length(), max(0.0, seconds - alone)
        average = self._extra_s.get(size, extra)
        self._extra_s[size] = average + FRESH * (min(extra, OUTLIER * max(average, alone)) - average)
        self._readings[size] = self._readings.get(size, 0) + 1

    def pay(self, tokens: int, seqs: int) -> bool:
        """Return whether a step of `seqs` sequences should jump over `tokens` tokens, all its jumps together."""
        size = seqs.bit_length()
        known = self._readings.get(size, 0) >= READINGS
        if not known or tokens * self._step_cost.decode_s(seqs) > GAIN * self._extra_s[size] * seqs:
            self._refused = 0
            return True
        self._refused = (self._refused + 1) % AGAIN
        return self._refused == 0
