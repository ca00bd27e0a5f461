"""Growth policy: which sequence takes another block when the pool runs full, so that bad luck is no preemption.

Admission starts what will *probably* fit.  When unusually few outputs end, the pool fills up, and sequences have to
pause.  A paused sequence keeps its blocks and loses nothing, as long as others end.  So it matters which ones continue.
A token takes 1/block_size of a block, whatever the sequence, and an end gives back all that a sequence holds.  If
large and small sequences end equally often, a token of a large one is more likely to free many blocks.  So the smaller
a sequence, the more blocks have to be left over when it takes one.  The last blocks belong to the largest one.

    blocks that must be left over
    |                                              .'     head + spread
    |                                         . '
    |                                . . '                head: what the largest still needs
    |....... . . . '
    +---------------------------------------------->
     largest              by size              smallest

The spread is what the total of independent sequences varies by: the root of their number times their mean size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import sqrt

SPREAD = 0.5
HEAD = 1.0  # times the mean size: the most that is kept for the largest sequence
POWER = 4


class GrowthPolicy:
    """The sizes of all sequences that hold blocks, at one moment.  Building takes O(n log n), a question O(log n)."""

    def __init__(self, holders: Iterable[tuple[int, int]]) -> None:
        """`holders`: (blocks held, blocks still needed at the most) of each."""
        sizes = sorted((-held, need) for held, need in holders)
        self._sizes = [size for size, _ in sizes]  # negative: the largest first
        count = max(1, len(sizes))
        mean = -sum(self._sizes) / count
        self._head = min(sizes[0][1], HEAD * mean) if sizes else 0.0
        self._spread = SPREAD * sqrt(count) * mean

    @property
    def relaxed(self) -> float:
        """With this many blocks left over every sequence may take one."""
        return self._head + self._spread

    def may_take(self, held: int, left: int) -> bool:
        """Return whether a sequence that holds `held` blocks may take one that leaves `left` for the others.  The
        largest may while there is any."""
        if left >= self.relaxed:
            return True
        rank = bisect_left(self._sizes, -held)
        return rank == 0 or left >= self._head + self._spread * (rank / len(self._sizes)) ** POWER
