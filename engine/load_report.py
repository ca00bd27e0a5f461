"""How fast an engine is."""

from __future__ import annotations

import math


class Rate:
    """Moving average of a growing count, per second; what happened `seconds` ago weighs 1/e of what happens now."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._count = 0
        self._at: float | None = None
        self.value = 0.0

    def update(self, count: int, now: float) -> float:
        """`count` as of `now` (seconds, monotonic)."""
        if self._at is None:
            self._at, self._count = now, count
        elif now > self._at:
            elapsed = now - self._at
            weight = 1 - math.exp(-elapsed / self._seconds)
            self.value += weight * ((count - self._count) / elapsed - self.value)
            self._at, self._count = now, count
        return self.value


class Pace:
    """Seconds from one step to the next: the mean of the first ones, then a moving average.  Idle time is left out."""

    STEPS = 32  # what happened so many steps ago weighs 1/e of what happens now

    def __init__(self) -> None:
        self._last: float | None = None
        self._seen = 0
        self.value = 0.0  # 0: not known

    def step(self, now: float) -> float:
        """A step's results are in, at `now` (seconds, monotonic).  Returns the seconds it took; 0 after a pause."""
        took = 0.0
        if self._last is not None:
            took = now - self._last
            self._seen = min(self._seen + 1, self.STEPS)
            self.value += (took - self.value) / self._seen
        self._last = now
        return took

    def pause(self) -> None:
        """What comes next does not follow the last step."""
        self._last = None
