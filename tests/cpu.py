"""CPU time of test files, which is more significant than their wall time among other tests.

A process that has ended counts with its parent, if that has waited for it.  On other systems than Linux all is zero.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
USER = 11  # first of four times behind the name in /proc/PID/stat: user and system time, and those of ended children


def tree_s() -> float:
    """Return the CPU seconds so far of this process, its descendants, and those of them that have ended."""
    ticks, rest = 0, [os.getpid()]
    while rest:
        folder = PROC / str(rest.pop())
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[USER : USER + 4])
            for thread in (folder / "task").iterdir():
                rest += [int(pid) for pid in (thread / "children").read_text().split()]
        except OSError:  # it has ended meanwhile
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU seconds between two looks."""

    def __init__(self) -> None:
        self._last = tree_s()

    def spent_s(self) -> float:
        """Return the CPU seconds since the last call."""
        last, self._last = self._last, tree_s()
        return max(0.0, self._last - last)
