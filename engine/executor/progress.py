"""Reports the progress of a long job, in complete lines, because several processes share one terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 2.0  # minimum seconds between two lines; a shorter job prints none
GB = 1e9


class Progress:
    """Counts finished units of a job, and passes a line to `report` at most every EVERY_S seconds."""

    def __init__(self, report: Callable[[str], object], what: str, total: int, *, in_bytes: bool = False) -> None:
        """`what`: the start of each line.  `total`: units, or bytes, which are shown in GB."""
        self._report, self._what, self._total, self._in_bytes = report, what, total, in_bytes
        self._done = 0
        self._reported = time.monotonic()

    def expect(self, total: int) -> None:
        """Correct the total, if there is more work than expected."""
        self._total = total

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""
        self._done += amount
        now = time.monotonic()
        if now - self._reported >= EVERY_S and self._done < self._total:
            self._reported = now
            self._report(f"{self._what}: {self._shown(self._done)} of {self._shown(self._total)}")

    def _shown(self, amount: int) -> str:
        return f"{amount / GB:.1f} GB" if self._in_bytes else str(amount)
