"""Forecast accuracy: counts since the engine started.

Two predictions are judged.  For each output, when its sequence starts: the lengths within which it stays with the
probabilities of `LEVELS`.  If the life table is right, these shares of the outputs do.  And for the sequences that
hold blocks at some moment, a cohort: the bound on what they hold at once, without sequences that join later.  A bound
should be passed rarely (forecast.py has the rate) and not lie far above.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import msgspec

from quire.engine.core.sequence import Sequence, State

LEVELS = (0.5, 0.9, 0.99)


class ForecastAccuracy(msgspec.Struct):
    """Predictions and how many of them came true; exported in EngineLoad and as metrics."""

    judged: list[int] = msgspec.field(default_factory=lambda: [0] * len(LEVELS))  # outputs, by level
    within: list[int] = msgspec.field(default_factory=lambda: [0] * len(LEVELS))  # those no longer than predicted
    peaks: int = 0  # cohorts
    peaks_passed: int = 0  # those that held more than their bound
    bound_blocks: int = 0  # sum of the bounds
    peak_blocks: int = 0  # sum of what was held at the most

    def output(self, predicted: Several[int], produced: int, cap: int) -> None:
        """Count an output that ended by itself or at its cap, `produced` tokens long.

        A level whose length lies at the cap or beyond predicted nothing."""
        for level, length in enumerate(predicted):
            if length < cap:
                self.judged[level] += 1
                self.within[level] += produced <= length

    def peak(self, bound: int, held: int) -> None:
        """Count a cohort that is over."""
        self.peaks += 1
        self.peaks_passed += held > bound
        self.bound_blocks += bound
        self.peak_blocks += held

    def table(self) -> list[tuple[float, int, int]]:
        """(level, outputs judged, those within) for each level."""
        return list(zip(LEVELS, self.judged, self.within, strict=True))


def tokens_held(seq: Sequence, step: int) -> int:
    """Tokens that a sequence keeps in the KV cache at the end of `step`, or will when it has prefilled or resumed."""
    known = seq.state is State.PREFILLING or seq.state is State.WAITING
    return len(seq.tokens) if known else seq.computed_before(step + 1)


class Cohort:
    """Sequences that held blocks when a bound was computed, until the rest of them cannot hold more than they have."""

    def __init__(self, members: list[tuple[Sequence, int]], common: int, bound: int, block_size: int) -> None:
        """`members`: each with the number of its first blocks that are shared; `common`: these, counted once."""
        self.bound = bound
        self.peak = 0  # maximum of blocks held at once, as of the last look()
        self._members, self._common, self._size = members, common, block_size

    def look(self, step: int) -> bool:
        """Add up what the members hold at the end of `step`.  True: the cohort is over.  O(members)."""
        self._members = [(seq, shared) for seq, shared in self._members if seq.state is not State.FINISHED]
        held = most = self._common if self._members else 0
        for seq, shared in self._members:
            held += -(-tokens_held(seq, step) // self._size) - shared
            most += -(-seq.limit // self._size) - shared
        self.peak = max(self.peak, held)
        return most <= self.peak
