"""Hooks of pytest: limits and workers follow the machine, a pause of the machine is no verdict, and CI ends in time.

- A test that fails while the machine stood still for a second runs again, at most twice; the summary names it.  What
  stood still is decided by a process that only sleeps (pace.py), never by the test.  A test that hangs is not repeated.
- One test takes at most TEST_S with all its repeats, and TEARDOWN_S more for its fixtures.  If a call never returns to
  the interpreter, the process prints its stacks and ends; xdist starts another worker.
- After UNTIL, a time in seconds since 1970 that `.ci/run` sets, no test starts.  The run then fails, and its summary
  says how many tests did not run and which files were slow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import time
from collections import Counter
from typing import Any, cast

import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.runner import runtestprotocol

from tests import pace
from tests.cpu import Meter

PAUSE_S = 1.0  # a shorter pause is for the waits of a test to survive
TRIES = 3
TELL_S = 0.2  # until a pause that has just ended is known
TEST_S = 600.0  # longest limit of one test, on the slowest machine
TEARDOWN_S = 60.0  # for the fixtures of a test that has used up its limit
STUCK_S = 60.0  # more, for a call that no signal interrupts
UNTIL = "TESTS_UNTIL"
SLOW_FILES = 40  # files that the summary names
SLOW_S = 60.0  # sum of the tests' times from which on the summary names files


class Limit:
    """The limit of the test that runs: first a signal, then the end of the process."""

    def __init__(self) -> None:
        self._settings: Any = None  # pytest-timeout's; None: no test with a limit runs
        self._end = 0.0  # on the monotonic clock

    def start(self, item: pytest.Item, settings: Any) -> bool:
        """Begin.  The limit in `settings` is meant for an idle machine of two cores."""
        limit_s = min(pace.patience(settings.timeout, TEST_S), max(TEARDOWN_S, remaining_s()))
        self._settings, self._end = settings, time.monotonic() + limit_s
        return self._arm(item, limit_s)

    def continue_after_failure(self, item: pytest.Item) -> None:
        """Bound the fixtures and repeats that follow: pytest ends both timers when a test fails."""
        if self._settings is not None:
            self._arm(item, max(TEARDOWN_S, self._end - time.monotonic()))

    @property
    def half_spent(self) -> bool:
        """Whether a repeat may not fit."""
        return self._settings is not None and self._end - time.monotonic() < TEST_S / 2

    def stop(self) -> None:
        """End both timers."""
        self._settings = None
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, item: pytest.Item, seconds: float) -> bool:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True, file=stderr)
        return bool(pytest_timeout.pytest_timeout_set_timer(item, self._settings._replace(timeout=seconds)))


_limit = Limit()
_meter = Meter()


def remaining_s() -> float:
    """Seconds until UNTIL; negative afterwards."""
    return float(os.environ.get(UNTIL, "inf")) - time.time()


def pytest_sessionstart() -> None:
    """Start the process that sees pauses, and let signals mean what they mean in a terminal.

    Whatever starts the tests in the background may ignore SIGINT or SIGHUP, and the programs under test would inherit
    that: the tests that send them would wait for nothing."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    pace.watch()


def pytest_collection_finish() -> None:
    """Leave what the collection took out of the first file's CPU time."""
    _meter.spent_s()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Make `timeout` of pyproject.toml, and of a marker, a bound of a hang on this machine."""
    return _limit.start(item, settings)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: object) -> None:
    """Continue with the limit after a failure."""
    if isinstance(node, pytest.Item):
        _limit.continue_after_failure(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`."""
    return pace.workers()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run one test, and again if its failure may be the machine's."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(1, TRIES + 1):
        began = time.monotonic()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if attempt == TRIES or _limit.half_spent or not any(_failed(report) for report in reports):
            break
        time.sleep(TELL_S)
        paused = pace.stood_still(began, PAUSE_S)
        if not paused:
            break
        item.user_properties.append(("repeated", f"failed while the machine stood still for {paused:.1f} s"))
        _finish_fixtures(item)
    _limit.stop()
    if nextitem is None or nextitem.path != item.path:  # a look at all processes takes a millisecond
        reports[-1].user_properties.append(("cpu_s", _meter.spent_s()))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if remaining_s() < 0:
        item.session.shouldfail = f"the tests have used up their time ({UNTIL}): no other starts"
    return True


def _failed(report: pytest.TestReport) -> bool:
    return report.failed and "Timeout (>" not in report.longreprtext


def _finish_fixtures(item: pytest.Item) -> None:
    """End the fixtures of every scope: one of them may have failed, or serve from what the pause has broken."""
    with contextlib.suppress(Exception):
        item.session._setupstate.teardown_exact(None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that ran again, the slow files of a long run, and how many tests did not run."""
    files, cpu = Counter[str](), Counter[str]()
    ran: set[str] = set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            file = report.nodeid.split("::")[0]
            files[file] += math.ceil(1000 * report.duration)
            ran.add(report.nodeid)
            for name, value in report.user_properties if report.when == "teardown" else ():
                if name == "cpu_s":
                    cpu[file] += math.ceil(1000 * cast(float, value))
                elif name == "repeated":
                    terminalreporter.write_line(f"repeated: {report.nodeid} {value}")
    if files.total() >= 1000 * SLOW_S:
        total = f"of {cpu.total() / 1000:.0f} and {files.total() / 1000:.0f}"
        terminalreporter.write_line(f"CPU seconds and seconds of the dearest files, {total}:")
        for file, milliseconds in cpu.most_common(SLOW_FILES):
            terminalreporter.write_line(f"{milliseconds / 1000:8.1f} {files[file] / 1000:8.1f} {file}")
    if remaining_s() < 0:
        collected = terminalreporter._session.testscollected
        terminalreporter.write_line(f"out of time: {collected - len(ran)} of {collected} tests did not run")
