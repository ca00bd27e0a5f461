"""Sets the priority of a process.  On Linux each thread has its own, and new threads inherit it."""

from __future__ import annotations

import contextlib
import os


def set_priority(process: int, nice: int) -> None:
    """Give all threads of a process this nice value.  Threads that end meanwhile, or may not get it, are left alone."""
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
