"""Accounting checks: full checks of the block accounting, when the engine becomes idle, every 10 s while it is busy,
and on demand.

A full check visits every block and every block table, which takes 0.1 s for the KV cache of a large GPU.  So a turn of
the loop runs one part of it (core/accounting.py), and a token waits at most for one part.  A busy engine begins a check
every BUSY_EVERY_S seconds, or less often if checks would take more than MAX_SHARE of the time.  An accounting error is
always a bug: a leak reduces the capacity until a restart, and a double free lets two sequences write into one block,
which would mix two clients' answers.
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
MAX_SHARE = 0.005  # maximum fraction of the time that checks of a busy engine take
PATIENCE_S = 10.0  # seconds that request_check() waits for the loop, which may be in a long step


class AccountingChecks:
    """Observer that runs the full checks and keeps their results."""

    def __init__(self, core: Scheduler, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, monotonic."""
        self._core, self._clock = core, clock
        self._due_at = clock() + BUSY_EVERY_S  # monotonic seconds of the next check of a busy engine
        self._each_turn, self._stop = config.check_accounting, config.on_accounting_error == "stop"
        self._checked = False  # whether a check has begun since the engine became idle
        self._under_way = False  # whether some parts of a check have run, and others have not
        self._spent_s = 0.0  # seconds that the parts of the running check took
        self._alarm_at = 0.0  # monotonic seconds before which errors are not logged again
        self._requests: deque[Future[str]] = deque()  # checks requested by other threads
        self._answers: list[Future[str]] = []  # requests that the running check answers
        self.fatal: AccountingError | None = None  # an error after which the engine must report its load and end

    def observe(self, record: TurnRecord) -> None:
        """Run the next part of a check, or the first one if a check is due.  Never raises; see `fatal`."""
        settled = record.idle and record.was_idle and not record.commands and not self._checked
        due = not record.idle and self._clock() >= self._due_at
        if not self._answers and self._requests:  # a check that answers a request must begin after the request
            self._answers = [self._requests.popleft() for _ in range(len(self._requests))]
            self._core.auditor.restart()
            self._under_way = True
        if self._each_turn or settled or due or self._under_way:
            self._checked = True
            self._run(self._core.auditor.whole if self._each_turn else self._core.auditor.part)
        self._checked &= record.idle

    @property
    def awaited(self) -> bool:
        """Whether another thread waits for a check, so that an idle engine must not wait for control messages between
        parts."""
        return bool(self._answers or self._requests)

    def request_check(self) -> str:
        """Let the loop run a check after its current turn, and wait for it.  Returns the error; "": none.

        Call it from other threads than the loop's.  Raises TimeoutError after PATIENCE_S."""
        request: Future[str] = Future()
        self._requests.append(request)
        return request.result(PATIENCE_S)

    def _run(self, check: Callable[[], bool | None]) -> None:
        """Run a part of a check, or all of it.  `check` returns False if parts are left."""
        began, found = self._clock(), ""
        try:
            self._under_way = check() is False
        except AccountingError as error:
            self._under_way, found = False, str(error)
            self._alarm(error)
        now = self._clock()
        self._spent_s += now - began
        self._due_at = now + max(BUSY_EVERY_S, self._spent_s / MAX_SHARE)
        if not self._under_way:
            self._spent_s = 0.0
            for request in self._answers:
                request.set_result(found)
            self._answers = []

    def _alarm(self, error: AccountingError) -> None:
        """Count and log an accounting error."""
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
