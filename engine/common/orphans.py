"""Triggers of a drain: signals, and the death of the process's supervisor."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from quire.engine.common import log_queue, readiness

POLL_S = 0.5

log = logging.getLogger("quire.process")


def end_with_supervisor(grace_s: float, parent: Callable[[], int] = os.getppid) -> None:
    """Drain this process when its supervisor dies, and end it `grace_s` seconds later at the latest.

    Starts a thread.  On Linux the kernel sends SIGTERM at that moment, too (`die_with_parent`), but a process cannot
    drain if its Redis has ended with the supervisor.  Does nothing in a process without a supervisor."""
    if os.environ.get(readiness.VARIABLE):
        first = parent()
        threading.Thread(target=_watch, args=(first, grace_s, parent), name="orphan watch", daemon=True).start()


def _watch(first: int, grace_s: float, parent: Callable[[], int]) -> None:
    while parent() == first:
        time.sleep(POLL_S)
    log.warning("the supervisor (PID %d) has gone: this process drains, and ends in %g s at the latest", first, grace_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    log_queue.drain()
    os._exit(1)


def drain_signals() -> list[signal.Signals]:
    """Return the signals that start a drain: SIGINT, SIGTERM, and SIGHUP unless `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
