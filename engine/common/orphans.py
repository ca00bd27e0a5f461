"""What makes a process drain and end: signals, and the death of its supervisor."""

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
    """Drain this process when its supervisor has gone, and end it `grace_s` seconds later at the latest.

    On Linux the kernel sends SIGTERM at that moment, too (`die_with_parent`).  This thread also ends a process that
    cannot drain: its Redis may have ended with the supervisor.  It does nothing in a process without a supervisor."""
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
    """Return the signals at which a process drains: SIGINT, SIGTERM, and SIGHUP unless `nohup` has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
