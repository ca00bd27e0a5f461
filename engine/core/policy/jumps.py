"""Jump costs: whether a step in which sequences jump over forced tokens saves more time than it takes.

A jump turns a decode step into one with slices, which takes longer for every sequence in it.  On a GPU it launches
other kernels, a large batch without a CUDA graph, so that a jump of four tokens may double the step.

    decode step       D seconds for n sequences                    a row of it is worth D / n
    step with jumps   D + extra seconds                            it saves a row for each token that it jumps over

So jumps pay where tokens * D / n > extra.  They are made only where they save GAIN times as much as they add: every
sequence waits for the longer step, few of them jump, and a batch ends with its slowest sequence.  What they add depends
on the device, the model and n, so it is measured.

The search for forced tokens takes the host some microseconds for each sequence with a grammar.  It stops for a while
where jumps are refused again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.core.policy.step_cost import FRESH, OUTLIER, StepCostModel

READINGS = 4  # steps with jumps that are measured before any is refused
GAIN = 2.0
PATIENCE = 16  # refused plans, one after another, before the search for forced tokens rests
REST = 256  # plans without it.  One step with jumps is measured then: what made them slow may have passed


@dataclass(slots=True)
class _Size:
    """What is known of steps with about as many sequences."""

    extra_s: float = 0.0  # moving average of what jumps add
    readings: int = 0
    refused: int = 0  # plans since the last one with jumps, or since the last rest
    rest: int = 0  # plans of the rest that are left
    again: bool = False  # after the rest, one step is measured


class JumpCosts:
    """Knows what jumps add to a step, for each power of two of sequences.  O(1) each."""

    def __init__(self, step_cost: StepCostModel) -> None:
        self._step_cost = step_cost
        self._sizes: dict[int, _Size] = {}  # measurements by bit length of the sequences in a step

    def record(self, seconds: float, seqs: int) -> None:
        """Learn from a step with jumps, without prompts.  `seqs`: sequences that decode or jump in it."""
        self._step_cost.mixed_steps += 1
        if not (alone := self._step_cost.decode_s(seqs)):
            return
        size, extra = self._size(seqs), max(0.0, seconds - alone)
        if not size.readings:
            size.extra_s = extra
        size.extra_s += FRESH * (min(extra, OUTLIER * max(size.extra_s, alone)) - size.extra_s)
        size.readings += 1

    def pay(self, tokens: int, seqs: int) -> bool:
        """Return whether a step of `seqs` sequences should jump over `tokens` tokens, all its jumps together."""
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
        """Return whether to search for forced tokens in a step; ask once for each.  `prompts`: some are computed, and
        the next steps with them have slices in any case."""
        size = self._size(seqs)
        if not size.rest:
            return True
        size.rest -= 1
        return prompts

    def _size(self, seqs: int) -> _Size:
        return self._sizes.setdefault(seqs.bit_length(), _Size())
