"""Silence: measures how long a watched component has made no progress, without counting pauses of the machine."""

from __future__ import annotations


class Silence:
    """Adds up the time between checks in which a progress mark has not changed.

    If the watcher itself slept for long, the machine or the process was stopped (SIGSTOP, a debugger, a busy host).  So
    the time between two checks counts as at most 2 * pause_s."""

    def __init__(self, pause_s: float) -> None:
        """`pause_s`: intended seconds between two checks."""
        self._pause_s = pause_s
        self._mark: float = 0
        self._spent_s = 0.0
        self._looked: float | None = None

    def look(self, mark: float, now: float) -> float:
        """Return the seconds without progress.  `mark`: a value that changes with progress; 0: no work is running."""
        if not mark or mark != self._mark or self._looked is None:
            self._mark, self._spent_s = mark, 0.0
        else:
            self._spent_s += min(now - self._looked, 2 * self._pause_s)
        self._looked = now
        return self._spent_s
