"""Growth policy: which sequences may take another block when the pool is almost full, to avoid preemptions.

Admission starts sequences that will *probably* fit.  If fewer outputs end than predicted, the pool fills up, and some
sequences must pause.  A paused sequence keeps its blocks, so pausing costs no recomputation.  Every token takes
1/block_size of a block, and an ending sequence frees all its blocks.  If large and small sequences end equally often
per token, a token of a large sequence frees more blocks on average.  So large sequences go first: the smaller a
sequence, the more blocks must stay free when it takes one, and the largest sequence may take the last block.

    blocks that must stay free
    |                                              .'     head + spread
    |                                         . '
    |                                . . '                head: blocks that the largest sequence still needs
    |....... . . . '
    +---------------------------------------------->
     largest              by size              smallest

The spread estimates how much the total size of independent sequences varies: sqrt(number of sequences) * mean size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import sqrt

SPREAD = 0.5
HEAD = 1.0  # maximum blocks kept for the largest sequence, as a multiple of the mean size
POWER = 4  # exponent of the curve above


class GrowthPolicy:
    """A snapshot of the sizes of all sequences that hold blocks.  Building takes O(n log n), may_take() O(log n)."""

    def __init__(self, holders: Iterable[tuple[int, int]]) -> None:
        """`holders`: (blocks held, maximum blocks still needed) per sequence."""
        sizes = sorted((-held, need) for held, need in holders)
        self._sizes = [size for size, _ in sizes]  # negative: the largest first
        count = max(1, len(sizes))
        mean = -sum(self._sizes) / count
        self._head = min(sizes[0][1], HEAD * mean) if sizes else 0.0
        self._spread = SPREAD * sqrt(count) * mean

    @property
    def relaxed(self) -> float:
        """Number of free blocks from which every sequence may take a block."""
        return self._head + self._spread

    def may_take(self, held: int, left: int) -> bool:
        """Return whether a sequence that holds `held` blocks may take another block, if `left` blocks then stay free.

        The largest sequence may take any block."""
        if left >= self.relaxed:
            return True
        rank = bisect_left(self._sizes, -held)
        return rank == 0 or left >= self._head + self._spread * (rank / len(self._sizes)) ** POWER
