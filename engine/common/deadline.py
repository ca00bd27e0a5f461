"""The process ends when something that nothing can interrupt takes too long: a call into a GPU that is lost, say.

The timer is faulthandler's.  It needs no thread of Python, so it works while a call holds the interpreter.
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
_ends: list[float] = []  # running blocks with a deadline; faulthandler has one timer for all


@contextlib.contextmanager
def ends_process(after_s: float) -> Iterator[None]:
    """End the process with status 1, and print where its threads were, unless the block ends within `after_s` seconds.

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
    """One descriptor for the life of the process: faulthandler keeps its number."""
    return descriptor_for_crashes()
