"""Isolation: finds the request that makes steps fail, so that it ends and the others finish.

A failed step (StepError: out of memory, an exception in a kernel's binding) names no culprit.  Every sequence in it
returns to the queue with its tokens and is computed again.  Most failures do not repeat, so all start again together.
A sequence that was in two failed steps without gaining a token between them becomes a suspect.  Suspects run in groups,
one group after the other, and a group whose step fails is split in half:

    step fails   A B C D E F G H         first failure: all start again
    step fails   A B C D E F G H         second failure at the same positions: all are suspects
    step fails   A B C D | E F G H       only the first group may start
    step runs    A B | C D | E F G H     A and B gain a token each: cleared, and they keep running
    step fails   A B + C D | E F G H     C and D failed again; A and B are at new positions
    step fails   C | D | E F G H         C was alone: its request ends
    step runs    D | E F G H  ...        once every group has gained a token, anything may start

One bad request among n makes at most 4 + log2(n) steps fail.  Halves find the request in the fewest steps.  After the
death of an engine, suspects are tried one at a time instead ("Suspects" in engine/wire/README.md).  Recovery from a
death takes longer than from a failed step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

from quire.engine.core.sequence import Sequence, State

FAILED_TWICE = "the engine failed on this request twice at the same position"  # message for clients


class Isolation:
    """Decides which sequences may start after failed steps, and which request ends."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()  # groups of suspects; only members of the first may start

    def failed(self, sequences: Iterable[Sequence], departed: Set[str]) -> str | None:
        """A step with these sequences failed.  Returns the id of the request that must end; None: every one continues.

        A request must end if it was alone in the step and was in a failed step at the same position before.
        `departed`: requests of further sequences in the step, which have ended since.  They may be the cause."""
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
        """Some suspect has yet to gain a token."""
        groups = self._groups
        while groups and not any(seq.known == seq.failed_at and seq.state is not State.FINISHED for seq in groups[0]):
            groups.popleft()
        return bool(groups)

    def first(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first of these that may start; None: none may before the suspects have gained a token."""
        if not self.active:
            return next(iter(waiting), None)
        group = set(map(id, self._groups[0]))
        return next((seq for seq in waiting if id(seq) in group), None)
