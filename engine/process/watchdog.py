"""Watchdog: ends an engine whose step never returns, so that other engines compute its requests.

During a hung step (a driver that does not answer, a deadlock in a kernel) the bus thread would renew the lease and
claim requests forever.  The watchdog has its own thread, because the loop's thread is inside the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quire.engine.common.silence import Silence

POLL_S = 1.0  # maximum seconds between two checks


class Watchdog:
    """Calls `on_hang` once, on the watchdog's thread, when a step has taken longer than `timeout_s`."""

    def __init__(self, timeout_s: float, busy_since: Callable[[], float], on_hang: Callable[[float], None]) -> None:
        """`busy_since`: returns the monotonic seconds at which the current step began; 0: no step runs.  `on_hang` gets
        the seconds that the step has taken."""
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
