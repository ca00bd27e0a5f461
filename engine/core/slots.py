"""Slots: the indices of sequences in the executor's batch.

    free --assign--> taken --vacate(step N)--> cooling --step N committed--> free
      ^                |
      +--- withdraw ---+   no plan has named the slot

Steps in flight may still report tokens of a vacated slot.  The slot belongs to its sequence until the last such step is
committed, so a reported (slot, token) is never ambiguous.
"""

from __future__ import annotations

from collections import deque

from quire.engine.core.blocks import AccountingError
from quire.engine.core.sequence import Sequence


class Slots:
    """Owner of all slots.  Every operation takes O(1)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.occupants: list[Sequence | None] = [None] * count  # per slot, the sequence whose tokens results report
        self._free = list(range(count - 1, -1, -1))
        self._vacated: list[int] = []  # slots that the next plan lists as freed
        self._cooling: deque[tuple[int, int]] = deque()  # (last step that may report a token of the slot, slot)

    @property
    def free(self) -> int:
        """Slots that the next plan can assign."""
        return len(self._free)

    @property
    def cooling(self) -> int:
        """Vacated slots that steps in flight may still report."""
        return len(self._cooling)

    def assign(self, seq: Sequence) -> None:
        """Give a free slot to the sequence.  Raises IndexError when none is free."""
        seq.slot = self._free.pop()
        self.occupants[seq.slot] = seq

    def vacate(self, seq: Sequence, step: int) -> None:
        """Free the slot with the next plan; `step`: the last plan that was issued."""
        self._vacated.append(seq.slot)
        self._cooling.append((step, seq.slot))
        seq.slot = -1

    def withdraw(self, seq: Sequence) -> None:
        """Free the slot of a sibling that has not forked yet; no plan has named this slot."""
        self.occupants[seq.slot] = None
        self._free.append(seq.slot)
        seq.slot = -1

    def reclaim(self, committed: int) -> None:
        """Free the slots that no step after `committed` can report."""
        while self._cooling and self._cooling[0][0] <= committed:
            _, slot = self._cooling.popleft()
            self.occupants[slot] = None
            self._free.append(slot)

    @property
    def vacated(self) -> list[int]:
        """The slots that the next plan will free, as a copy."""
        return list(self._vacated)

    def take_vacated(self) -> list[int]:
        """Return the slots that the plan has to free, and clear the list."""
        vacated, self._vacated = self._vacated, []
        return vacated

    def reset(self) -> None:
        """Free every slot: the executor has dropped its own tables."""
        self.occupants = [None] * self.count
        self._free = list(range(self.count - 1, -1, -1))
        self._vacated = []
        self._cooling.clear()

    def check(self) -> None:
        """Raise AccountingError unless every slot is either free or occupied."""
        taken = sum(seq is not None for seq in self.occupants)
        if taken + len(self._free) != self.count:
            raise AccountingError(f"{taken} slots taken and {len(self._free)} free of {self.count}")
