"""State eviction: which checkpoint of recurrent state is overwritten when no state slot is free.

All checkpoints have the same size, so the checkpoint with the lowest recency + saved work is evicted.  Both terms are
scaled to 0..1: recency is 1 for the checkpoint used last, and saved work is 1 for the checkpoint that saves most tokens
of recomputation.  A prefix hit counts as use.

    system prompt, hit often, 2,048 tokens saved               1.0 + 1.0
    end of a turn, 300 tokens after the last checkpoint        0.9 + 0.15
    middle of a long prompt, 128 tokens saved, never hit       0.3 + 0.06    <- evicted

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", arXiv 2411.19379, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

SAVED_WEIGHT = 1.0  # weight of saved work, relative to recency


class Candidate(Protocol):
    """The fields of a checkpoint that the policy reads."""

    used: int  # value of the pool's clock when the checkpoint was last written or found
    saved: int  # tokens that a hit saves


Kept = TypeVar("Kept", bound=Candidate)


class StateEviction:
    """Chooses the checkpoint to overwrite.  O(checkpoints) per choice."""

    def choose(self, checkpoints: Iterable[tuple[int, Kept]]) -> int:
        """Return the state slot of the checkpoint to overwrite; -1: there is none.  Ties go to the least recently
        used."""
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
