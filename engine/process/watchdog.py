"""Ends an engine whose step never returns, so that its requests are computed elsewhere.

A hung step (a driver that does not answer, a deadlock in a kernel) leaves the bus thread alive: it would renew the
lease and claim requests forever.  The watchdog is a thread of its own, because the loop's thread is inside the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quire.engine.common.silence import Silence

POLL_S = 1.0  # longest pause between two looks


class Watchdog:
    """Calls `on_hang` once, on its own thread, when the loop has been busy with one step for too long."""

    def __init__(self, timeout_s: float, busy_since: Callable[[], float], on_hang: Callable[[float], None]) -> None:
        """`busy_since`: monotonic seconds at which the step began; 0: there is none.  `on_hang` is given the seconds
        that the step has taken."""
        self._timeout_s, self._busy_since, self._on_hang = timeout_s, busy_since, on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = min(POLL_S, self._timeout_s / 4)
        silence = Silence(pause)
        while not self._stopped.wait(pause):
            now, since = time.monotonic(), self._busy_since()
            if silence.look(since, now) >= self._timeout_s:
                self._on_hang(now - since)
                return
