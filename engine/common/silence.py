"""How long something has shown no progress, as its watcher counts: a pause of the machine is no silence."""

from __future__ import annotations


class Silence:
    """Adds up the time between looks at a mark that does not change.

    A watcher that slept for long was stopped with the rest of the machine (SIGSTOP, a debugger, a busy host).  So a gap
    between two looks counts as two pauses at most."""

    def __init__(self, pause_s: float) -> None:
        """`pause_s`: intended time between two looks."""
        self._pause_s = pause_s
        self._mark: float = 0
        self._spent_s = 0.0
        self._looked: float | None = None

    def look(self, mark: float, now: float) -> float:
        """Return the seconds without progress.  `mark`: changes with progress; 0: nothing is expected now."""
        if not mark or mark != self._mark or self._looked is None:
            self._mark, self._spent_s = mark, 0.0
        else:
            self._spent_s += min(now - self._looked, 2 * self._pause_s)
        self._looked = now
        return self._spent_s
