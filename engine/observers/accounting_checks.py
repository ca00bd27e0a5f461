"""Accounting checks: full checks of the block accounting, when the engine becomes idle, every 10 s while it is busy,
and on demand.

A full check visits every block and every block table, which takes tens of milliseconds for the KV cache of a large GPU.
So a busy engine runs it every BUSY_EVERY_S seconds, or less often if checks would take more than MOST_SHARE of the
time.  An accounting error is always a bug: a leak reduces the capacity until a restart, and a double free lets two
sequences write into one block, which would mix two clients' answers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from quire.engine.config import EngineConfig
from quire.engine.core.blocks import AccountingError, DoubleFree, Leak
from quire.engine.core.scheduler import Scheduler
from quire.engine.observers.turn_record import TurnRecord

log = logging.getLogger("quire.engine")

ALARM_S = 10.0  # minimum seconds between two log lines about accounting errors, since later checks find the same error
BUSY_EVERY_S = 10.0  # minimum seconds between two checks of a busy engine
MOST_SHARE = 0.005  # maximum fraction of the time that checks of a busy engine take
PATIENCE_S = 10.0  # seconds that request_check() waits for the loop, which may be in a long step


class AccountingChecks:
    """Observer that runs the full checks and keeps their results."""

    def __init__(self, core: Scheduler, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, monotonic."""
        self._core, self._clock = core, clock
        self._due_at = clock() + BUSY_EVERY_S  # monotonic seconds of the next check of a busy engine
        self._each_turn, self._stop = config.check_books, config.bad_books == "stop"
        self._checked = False  # whether the accounting was checked since the engine became idle
        self._alarm_at = 0.0  # monotonic seconds before which errors are not logged again
        self._requests: deque[Future[str]] = deque()  # checks requested by other threads
        self.fatal: AccountingError | None = None  # an error after which the engine must report its load and end

    def observe(self, record: TurnRecord) -> None:
        """Run a check if one is due.  Never raises; see `fatal`."""
        settled = record.idle and record.was_idle and not record.orders and not self._checked
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        due = not record.idle and self._clock() >= self._due_at
        if self._each_turn or settled or due or requests:
            found = self._check()
            self._checked = True
            for request in requests:
                request.set_result(found)
        self._checked &= record.idle

    def request_check(self) -> str:
        """Let the loop run a check after its current turn, and wait for it.  Returns the error; "": none.

        Call it from other threads than the loop's.  Raises TimeoutError after PATIENCE_S."""
        request: Future[str] = Future()
        self._requests.append(request)
        return request.result(PATIENCE_S)

    def _check(self) -> str:
        began = self._clock()
        try:
            self._core.auditor.whole()
        except AccountingError as error:
            totals = self._core.report.totals
            if isinstance(error, Leak):
                totals.leaks += 1
            elif isinstance(error, DoubleFree):
                totals.double_frees += 1
            else:
                totals.other_alarms += 1
            if (now := time.monotonic()) >= self._alarm_at:
                log.error("the block accounting does not balance, which is a bug: %s", error)
                self._alarm_at = now + ALARM_S
            if self._stop:
                self.fatal = error
            return str(error)
        finally:
            now = self._clock()
            self._due_at = now + max(BUSY_EVERY_S, (now - began) / MOST_SHARE)
        return ""
