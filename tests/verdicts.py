"""Hooks of pytest: time limits and workers follow the machine, and a pause of the machine is no verdict.

A test that fails while the machine stood still for a second runs again, at most twice; the summary names it.  What
stood still is decided by a process that only sleeps (pace.py), never by the test.  A test that hangs is not repeated.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import pytest_timeout
from _pytest.runner import runtestprotocol

from tests import pace

PAUSE_S = 1.0  # a shorter pause is for the waits of a test to survive
TRIES = 3
TELL_S = 0.2  # until a pause that has just ended is known


def pytest_sessionstart() -> None:
    """Start the process that sees pauses."""
    pace.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Make `timeout` of pyproject.toml, and of a marker, a bound of a hang on this machine."""
    longer = settings._replace(timeout=pace.patience(settings.timeout))
    return bool(pytest_timeout.pytest_timeout_set_timer(item, longer))


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
        if attempt == TRIES or not any(_failed(report) for report in reports):
            break
        time.sleep(TELL_S)
        paused = pace.stood_still(began, PAUSE_S)
        if not paused:
            break
        item.user_properties.append(("repeated", f"failed while the machine stood still for {paused:.1f} s"))
        _finish_fixtures(item)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _failed(report: pytest.TestReport) -> bool:
    return report.failed and "Timeout (>" not in report.longreprtext


def _finish_fixtures(item: pytest.Item) -> None:
    """End the fixtures of every scope: one of them may have failed, or serve from what the pause has broken."""
    with contextlib.suppress(Exception):
        item.session._setupstate.teardown_exact(None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that ran again."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for name, value in report.user_properties:
                    if name == "repeated":
                        terminalreporter.write_line(f"repeated: {report.nodeid} {value}")
