"""Who may take another block when the pool runs full: what keeps bad luck from becoming a preemption.

Admission starts what will *probably* fit.  When unusually few outputs end, the pool fills up all the same, and rows
have to wait.  One that waits with its blocks loses nothing, as long as somebody else ends; so it matters who goes on.
A token costs every row the same 1/block_size of a block, but its end gives back all that it holds: where a large row
and a small one end equally often, the large one's tokens are the better bet on a block.  So the smaller a row, the more
blocks have to be left over when it takes one, and the last ones belong to the largest, if these can take it to its end.

    blocks that must be left over
    |                                              .'     head + spread
    |                                         . '
    |                                . . '                head: what the largest still needs
    |....... . . . '
    +---------------------------------------------->
     largest              by size              smallest

The spread is what the total of independent rows varies by: their number's root times their mean size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import sqrt

SPREAD = 0.5
HEAD = 1.0  # times the mean size: the most that is kept for the largest row
POWER = 4


class GrowthPolicy:
    """The sizes of all rows that hold blocks, at one moment.  Building costs O(n log n), a question O(log n)."""

    def __init__(self, rows: Iterable[tuple[int, int]]) -> None:
        """`rows`: (blocks held, blocks still needed at the most) of each."""
        sizes = sorted((-held, need) for held, need in rows)
        self._sizes = [size for size, _ in sizes]  # negative: the largest first
        count = max(1, len(sizes))
        mean = -sum(self._sizes) / count
        self._head = min(sizes[0][1], HEAD * mean) if sizes else 0.0
        self._spread = SPREAD * sqrt(count) * mean

    @property
    def relaxed(self) -> float:
        """With so many blocks left over anybody may take one."""
        return self._head + self._spread

    def may_take(self, held: int, left: int) -> bool:
        """Whether a row that holds `held` blocks may take what leaves `left` blocks for the others.  The largest may as
        long as there is any."""
        if left >= self.relaxed:
            return True
        rank = bisect_left(self._sizes, -held)
        return rank == 0 or left >= self._head + self._spread * (rank / len(self._sizes)) ** POWER
