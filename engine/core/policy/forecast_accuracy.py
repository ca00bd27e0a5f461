"""Forecast accuracy: how often two kinds of predictions came true since the engine started.

Output lengths: when a sequence starts, the forecast predicts a length for each probability in `LEVELS`.  With a correct
life table, this fraction of outputs is not longer than the predicted length.

Peak usage: a cohort is the set of sequences that hold blocks at one moment.  The forecast computes a bound on the
blocks that the cohort holds at once.  The usage should rarely exceed the bound, and should not stay far below it.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import msgspec

from quire.engine.core.sequence import Sequence, State

LEVELS = (0.5, 0.9, 0.99)


class ForecastAccuracy(msgspec.Struct):
    """Counts of predictions and of those that came true; exported in EngineLoad and as metrics."""

    judged: list[int] = msgspec.field(default_factory=lambda: [0] * len(LEVELS))  # outputs compared, per level
    within: list[int] = msgspec.field(default_factory=lambda: [0] * len(LEVELS))  # outputs within the predicted length
    peaks: int = 0  # cohorts compared
    peaks_passed: int = 0  # cohorts that held more blocks than their bound
    bound_blocks: int = 0  # sum of the cohorts' bounds, blocks
    peak_blocks: int = 0  # sum of the cohorts' actual peaks, blocks

    def output(self, predicted: Several[int], produced: int, cap: int) -> None:
        """Count an output of `produced` tokens that ended at a stop token or at its maximum length `cap`.

        Levels that predicted at least `cap` tokens are skipped: every output stays within them."""
        for level, length in enumerate(predicted):
            if length < cap:
                self.judged[level] += 1
                self.within[level] += produced <= length

    def peak(self, bound: int, held: int) -> None:
        """Count a cohort whose usage cannot rise any more.  `held`: its actual peak, blocks."""
        self.peaks += 1
        self.peaks_passed += held > bound
        self.bound_blocks += bound
        self.peak_blocks += held

    def table(self) -> list[tuple[float, int, int]]:
        """Return (level, outputs compared, outputs within the predicted length) per level."""
        return list(zip(LEVELS, self.judged, self.within, strict=True))


def tokens_held(seq: Sequence, step: int) -> int:
    """Return the tokens in a sequence's KV cache at the end of `step`; for prompts in prefill, all known tokens."""
    known = seq.state is State.PREFILLING or seq.state is State.WAITING
    return len(seq.tokens) if known else seq.computed_before(step + 1)


class Cohort:
    """The sequences that held blocks when a bound was computed, observed until their usage cannot rise any more."""

    def __init__(self, members: list[tuple[Sequence, int]], common: int, bound: int, block_size: int) -> None:
        """`members`: (sequence, number of shared blocks at its start).  `common`: all shared blocks, counted once."""
        self.bound = bound
        self.peak = 0  # maximum blocks held at once, as of the last look()
        self._members, self._common, self._size = members, common, block_size

    def look(self, step: int) -> bool:
        """Sum up the blocks of the members at the end of `step`.  Returns True if they cannot grow any more.
        O(members)."""
        self._members = [(seq, shared) for seq, shared in self._members if seq.state is not State.FINISHED]
        held = most = self._common if self._members else 0
        for seq, shared in self._members:
            held += -(-tokens_held(seq, step) // self._size) - shared
            most += -(-seq.limit // self._size) - shared
        self.peak = max(self.peak, held)
        return most <= self.peak
