"""Isolation: finds the request that makes steps fail, so that only this request ends with an error.

A failed step (StepError: out of memory, an exception in a kernel's binding) does not name the request that caused it.
Every sequence of the step returns to the queue with its tokens and is recomputed.  Most failures do not repeat, so all
sequences start again together.  A sequence that was in two failed steps without gaining a token between them becomes a
suspect.  Suspects run in groups, one group after the other, and a group whose step fails is split in half:

    step fails   A B C D E F G H         first failure: all start again
    step fails   A B C D E F G H         second failure at the same positions: all are suspects
    step fails   A B C D | E F G H       only the first group may start
    step runs    A B | C D | E F G H     A and B gain a token each: cleared, and they keep running
    step fails   A B + C D | E F G H     C and D failed again; A and B are at new positions
    step fails   C | D | E F G H         C was alone: its request ends
    step runs    D | E F G H  ...        once every group has gained a token, any sequence may start

One bad request among n makes at most 4 + log2(n) steps fail.  After the death of an engine process, suspects run one
at a time instead ("Suspects" in engine/wire/README.md), because recovery from a death takes longer than from a failed
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

from quire.engine.core.sequence import Sequence, State

FAILED_TWICE = "the engine failed on this request twice at the same position"  # message for clients


class Isolation:
    """Decides which sequences may start after failed steps, and which request ends."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()  # groups of suspects; only sequences of the first group may start

    def failed(self, sequences: Iterable[Sequence], departed: Set[str]) -> str | None:
        """Record that a step with these sequences failed.  Returns the id of the request that must end, or None.

        A request must end if it was alone in the step and was in a failed step at the same position before.
        `departed`: requests of ended sequences that were in the step, too, and may have caused the failure."""
        sequences = list(sequences)
        again = [seq for seq in sequences if seq.failed_at == seq.known]
        for seq in sequences:
            seq.failed_at = seq.known
        names = set(map(id, again))
        rest = [[seq for seq in group if id(seq) not in names] for group in self._groups]
        if again and len({seq.request.id for seq in sequences} | departed) == 1:
            self._groups = deque(rest)
            return again[0].request.id
        half = (len(again) + 1) // 2
        self._groups = deque([again[:half], again[half:], *rest])
        return None

    @property
    def active(self) -> bool:
        """Whether a suspect has not gained a token since its last failed step."""
        groups = self._groups
        while groups and not any(seq.known == seq.failed_at and seq.state is not State.FINISHED for seq in groups[0]):
            groups.popleft()
        return bool(groups)

    def first(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Return the first waiting sequence that may start.

        None: only suspects of the first group may start now, and none of them waits."""
        if not self.active:
            return next(iter(waiting), None)
        group = set(map(id, self._groups[0]))
        return next((seq for seq in waiting if id(seq) in group), None)
