"""Which checkpoint of recurrent state is overwritten when no place is free.

All checkpoints have the same size, so the one with the lowest recency + saved work goes.  Both are relative to the
largest of the checkpoints: recency 1 is the one used last, saved work 1 the one without which a hit would have to
compute most tokens again.  A checkpoint that was found counts as used then.

    system prompt, found often, 2,048 tokens saved     1.0 + 1.0
    end of a turn, 300 tokens behind the last one      0.9 + 0.15
    step of a long prompt, 128 tokens, never found     0.3 + 0.06    <- evicted

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", arXiv 2411.19379, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

SAVED_WEIGHT = 1.0  # factor of saved work; recency has 1


class Candidate(Protocol):
    """What the policy reads of a checkpoint."""

    used: int  # the pool's clock when it was written or found last
    saved: int  # tokens


Kept = TypeVar("Kept", bound=Candidate)


class StateEviction:
    """Chooses the checkpoint to overwrite.  O(checkpoints) per choice."""

    def choose(self, checkpoints: Iterable[tuple[int, Kept]]) -> int:
        """Return the place to overwrite; -1: there is none.  Among equals the least recently used one."""
        found = list(checkpoints)
        if not found:
            return -1
        first, last = min(each.used for _, each in found), max(each.used for _, each in found)
        most = max(each.saved for _, each in found)

        def worth(entry: tuple[int, Kept]) -> tuple[float, int]:
            each = entry[1]
            recency = (each.used - first) / max(1, last - first)
            return recency + SAVED_WEIGHT * each.saved / max(1, most), each.used

        return min(found, key=worth)[0]
