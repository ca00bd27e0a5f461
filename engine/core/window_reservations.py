"""Reservations: a sequence starts only if its blocks of sliding-window layers are reserved, so they never run out.

Between two plans a sequence holds at most its windows, and a plan computes at most `step_tokens`.  So the number of
sequences that fit a group is fixed:

    blocks of a group = sequences * reserved_blocks + blocks_per_plan

Reservations are counted in sequences.  If fewer sequences than slots fit, the engine uses fewer slots
(`max_sequences`).  Paused sequences keep their reservation.  Beams keep all their window blocks, so a beam search may
reserve more units than it has beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.core.blocks import AccountingError
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import Sequence as Seq


def max_sequences(
    groups: Sequence[WindowGroup], *, block_size: int, step_tokens: int, max_model_len: int, full_blocks: int
) -> int:
    """Return how many sequences fit all window groups."""
    plan = WindowGroup.blocks_per_plan(block_size, step_tokens, full_blocks)
    return min((group.blocks - plan) // group.reserved_blocks(block_size, max_model_len) for group in groups)


class WindowReservations:
    """Counts the sequences whose window blocks are reserved."""

    def __init__(self, each: list[int], capacity: int, block_size: int) -> None:
        """`each`: blocks per sequence, one entry per window group.  `capacity`: maximum sequences."""
        self.capacity = capacity
        self._each, self._size = each, block_size
        self._reserved = 0

    def may_hold(self, seq: Seq, gone: Iterable[Seq] = ()) -> bool:
        """Return whether a sequence and its siblings can start, if the sequences in `gone` are preempted first."""
        return self._reserved - sum(other.window_units for other in gone) + self._units_of(seq) <= self.capacity

    def refusal(self, width: int, blocks: int) -> str:
        """Return why `width` beams with `blocks` blocks in total can never run; "": they can."""
        if (units := self._units_for(width, blocks)) <= self.capacity:
            return ""
        return (
            f"the beams keep {blocks} blocks in layers with a sliding window, where {units} other sequences would fit; "
            f"this engine fits {self.capacity}"
        )

    def reserve(self, seq: Seq) -> None:
        """Reserve window blocks for a sequence that starts and for its siblings."""
        seq.window_units = self._units_of(seq)
        self._reserved += seq.window_units

    def leave(self, seq: Seq) -> None:
        """Cancel the reservation of a sequence, if it has one."""
        self._reserved -= seq.window_units
        seq.window_units = 0

    def check(self, live: Iterable[Seq]) -> None:
        """Raise AccountingError unless the sequences' reservations equal the count and fit the capacity."""
        units = sum(seq.window_units for seq in live)
        if units != self._reserved or units > self.capacity:
            reserved = f"{self._reserved} sequences of {self.capacity}"
            raise AccountingError(f"window blocks are reserved for {reserved}, {units} have them")

    def _units_of(self, seq: Seq) -> int:
        """Return the units that a leader reserves: one for itself and one per sibling, or the units of its beams."""
        request = seq.request
        if request.beams is None:
            return 1 + len(seq.siblings)
        blocks = request.beams.max_blocks(len(request.token_ids), seq.limit, self._size)
        return self._units_for(request.beams.width, blocks)

    def _units_for(self, width: int, blocks: int) -> int:
        return max(width, *(-(-blocks // each) for each in self._each)) if self._each else 0
