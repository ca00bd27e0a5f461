"""Reservations: a sequence starts only if the blocks of window layers cannot run out, whatever the others do.

A sequence holds at most its windows between two plans, and a plan computes at most `step_tokens`.  So the blocks of a
group are divided once:

    blocks of a group = sequences * reserved_blocks + blocks_per_plan

The unit is one sequence.  All slots fit, or the engine uses fewer slots (`most_sequences`).  Paused sequences keep
their reservation without a slot.  Beams keep all their window blocks, and reserve several units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.core.blocks import AccountingError
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import Sequence as Seq


def most_sequences(
    groups: Sequence[WindowGroup], *, block_size: int, step_tokens: int, max_model_len: int, full_blocks: int
) -> int:
    """Return how many sequences fit the smallest group."""
    plan = WindowGroup.blocks_per_plan(block_size, step_tokens, full_blocks)
    return min((group.blocks - plan) // group.reserved_blocks(block_size, max_model_len) for group in groups)


class WindowReservations:
    """Counts the sequences whose window blocks are reserved."""

    def __init__(self, each: list[int], capacity: int, block_size: int) -> None:
        """`each`: blocks per sequence of each group.  `capacity`: sequences."""
        self.capacity = capacity
        self._each, self._size = each, block_size
        self._reserved = 0

    def may_hold(self, seq: Seq, gone: Iterable[Seq] = ()) -> bool:
        """Return whether a sequence and its siblings can start, once the sequences in `gone` have left."""
        return self._reserved - sum(other.window_units for other in gone) + self._units_of(seq) <= self.capacity

    def refusal(self, width: int, blocks: int) -> str:
        """Return why `width` beams that take `blocks` blocks together can never run; "": they can."""
        if (units := self._units_for(width, blocks)) <= self.capacity:
            return ""
        return (
            f"the beams keep {blocks} blocks in layers with a sliding window, where {units} other sequences would fit; "
            f"this engine fits {self.capacity}"
        )

    def reserve(self, seq: Seq) -> None:
        """The sequence starts: reserve blocks for it and its siblings."""
        seq.window_units = self._units_of(seq)
        self._reserved += seq.window_units

    def leave(self, seq: Seq) -> None:
        """Cancel the reservation of a sequence.  Harmless for one that has none."""
        self._reserved -= seq.window_units
        seq.window_units = 0

    def check(self, live: Iterable[Seq]) -> None:
        """Raise AccountingError unless what sequences have is what is counted, and fits."""
        units = sum(seq.window_units for seq in live)
        if units != self._reserved or units > self.capacity:
            reserved = f"{self._reserved} sequences of {self.capacity}"
            raise AccountingError(f"window blocks are reserved for {reserved}, {units} have them")

    def _units_of(self, seq: Seq) -> int:
        """Sequences that a leader counts for: itself and its siblings, or what beams take."""
        request = seq.request
        if request.beams is None:
            return 1 + len(seq.siblings)
        blocks = request.beams.most_blocks(len(request.token_ids), seq.limit, self._size)
        return self._units_for(request.beams.width, blocks)

    def _units_for(self, width: int, blocks: int) -> int:
        return max(width, *(-(-blocks // each) for each in self._each)) if self._each else 0
