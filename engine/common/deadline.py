"""Ends the process if an uninterruptible call takes too long, such as a call into a lost GPU.

Uses faulthandler's timer, which needs no Python thread, so it works while a call holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Iterator
from functools import cache

from quire.engine.common.log_queue import descriptor_for_crashes

_lock = threading.Lock()
_ends: list[float] = []  # deadlines of the running blocks, monotonic seconds; faulthandler has only one timer


@contextlib.contextmanager
def ends_process(after_s: float) -> Iterator[None]:
    """End the process with status 1 and print all stack traces, unless the block ends within `after_s` seconds.

    Blocks may overlap, on any threads."""
    end = time.monotonic() + after_s
    with _lock:
        _ends.append(end)
        _set_timer()
    try:
        yield
    finally:
        with _lock:
            _ends.remove(end)
            _set_timer()


def _set_timer() -> None:
    if _ends:
        left = max(0.001, min(_ends) - time.monotonic())
        faulthandler.dump_traceback_later(left, exit=True, file=_stderr())
    else:
        faulthandler.cancel_dump_traceback_later()


@cache
def _stderr() -> int:
    """Return a file descriptor that stays open for the life of the process, because faulthandler keeps its number."""
    return descriptor_for_crashes()
