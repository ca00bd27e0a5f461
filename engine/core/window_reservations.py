"""Reservations: a sequence starts only if its blocks of sliding-window layers are reserved, so they never run out.

Between two plans a sequence holds at most its windows, or the blocks of all its tokens if these are fewer.  A plan
computes at most `step_tokens`.  So these blocks of a group suffice:

    sum over sequences of min(reserved_blocks, blocks of the maximum length + 1)  +  blocks_per_plan

Paused sequences keep their reservation.  Beams keep all their window blocks, so they reserve those of
their complete search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.core.blocks import AccountingError
from quire.engine.core.sequence import Sequence as Seq

UNBOUNDED = 1 << 30  # sequences that fit if no layer has a window


class WindowReservations:
    """Counts the reserved window blocks, per window group."""

    def __init__(self, each: Sequence[int], capacity: Sequence[int], block_size: int) -> None:
        """`each`: blocks to reserve for a sequence that is longer than its windows.  `capacity`: blocks that sequences
        can reserve.  Both have one entry per window group."""
        self.capacity = tuple(capacity)
        self._each, self._size = each, block_size
        self._reserved = [0] * len(each)

    def may_hold(self, seq: Seq, gone: Iterable[Seq] = ()) -> bool:
        """Return whether a sequence and its siblings can start, if the sequences in `gone` are preempted first."""
        taken = list(self._reserved)
        for other in gone:
            for group, count in enumerate(other.window_reserved):
                taken[group] -= count
        needed = zip(taken, self._needed(seq, 1 + len(seq.siblings)), self.capacity, strict=True)
        return all(count + need <= most for count, need, most in needed)

    def sequences_left(self) -> int:
        """Return how many more sequences fit if each fills its windows."""
        groups = zip(self.capacity, self._reserved, self._each, strict=True)
        return min(((most - taken) // each for most, taken, each in groups), default=UNBOUNDED)

    def refusal(self, seq: Seq, choices: int) -> str:
        """Return why this engine can never run `choices` choices like `seq` at once, or its beams; "" if it can."""
        for need, most in zip(self._needed(seq, choices), self.capacity, strict=True):
            if need > most:
                beams = seq.request.beams
                what = f"{beams.width} beams" if beams is not None else f"{choices} choices"
                blocks = f"reserve {need} blocks in layers with a sliding window"
                return f"{what} of {seq.limit} tokens, prompt included, {blocks}; this engine has {most}"
        return ""

    def reserve(self, seq: Seq) -> None:
        """Reserve window blocks for a sequence that starts and for its siblings."""
        self._set(seq, self._needed(seq, 1 + len(seq.siblings)))

    def share(self, leader: Seq, sibling: Seq) -> None:
        """Move a sibling's part of the leader's reservation to the sibling."""
        own = self._of_one(sibling)
        rest = tuple(count - part for count, part in zip(leader.window_reserved, own, strict=True))
        self._set(leader, rest)
        self._set(sibling, own)

    def leave(self, seq: Seq) -> None:
        """Cancel the reservation of a sequence, if it has one."""
        self._set(seq, ())

    def check(self, live: Iterable[Seq]) -> None:
        """Raise AccountingError unless the sequences' reservations equal the sums and fit the capacity."""
        held = [seq.window_reserved for seq in live if seq.window_reserved]
        sums = [sum(counts) for counts in zip(*held, strict=True)] or [0] * len(self._each)
        if sums != self._reserved or any(taken > most for taken, most in zip(sums, self.capacity, strict=True)):
            reserved = f"{self._reserved} blocks of {list(self.capacity)}"
            raise AccountingError(f"per window group {reserved} are reserved, sequences have {sums}")

    def _set(self, seq: Seq, blocks: tuple[int, ...]) -> None:
        for counts, sign in ((seq.window_reserved, -1), (blocks, 1)):
            for group, count in enumerate(counts):
                self._reserved[group] += sign * count
        seq.window_reserved = blocks

    def _needed(self, seq: Seq, choices: int) -> tuple[int, ...]:
        """Return the blocks that a leader reserves, for itself and its siblings (`choices`), or for its beams."""
        request = seq.request
        if request.beams is not None:
            blocks = request.beams.max_blocks(len(request.token_ids), seq.limit, self._size)
            return (blocks + request.beams.width,) * len(self._each)
        return tuple(count * choices for count in self._of_one(seq))

    def _of_one(self, seq: Seq) -> tuple[int, ...]:
        """Return the blocks to reserve for one sequence: one more than it holds, since a plan's tokens may straddle
        a block."""
        blocks = seq.max_blocks(self._size) + 1
        return tuple(min(each, blocks) for each in self._each)
