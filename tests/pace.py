"""Own every wait of the tests: each is a multiple of what this machine shows at the moment.

patience() bounds a hang, by LONGEST_S at most: a passing test never waits for so long.  paced() is a time-out of
Quire that a passing test does wait for, such as a lease.  wait_until() and until() poll; a pause of the machine
counts as one poll.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

GUARD = 3.0  # a bound of a hang is at least this many times what a test names
NOMINAL_S = 5e-4  # python_s() of the machine for which tests name their seconds
NOMINAL_CORES = 2  # cores of that machine
LONGEST_S = 300.0  # longest bound of one hang: it must end within TEST_S of verdicts.py, and CI within its time
MOST = 20.0  # largest factor: beyond it, the time-outs of CI end a test anyway
MEMORY_S = 120.0  # how long a measurement counts: the next load may be like the last one
EVERY_S = 2.0  # between two measurements, of two milliseconds each
PAUSE_S = 0.25  # an overslept witness: shorter pauses are a scheduler's ordinary delays
STEP_S = 1.0  # longest time between two polls that counts against a wait
POLL_S = 0.02

# Prints begin and end of each pause on the monotonic clock, which processes share; ends with its parent.
WITNESS = f"""
import select, time
last = time.monotonic()
while not select.select([0], [], [], 0.05)[0]:
    now = time.monotonic()
    if now - last > {PAUSE_S}:
        print(last, now, flush=True)
    last = now
"""


def python_s(tries: int = 20) -> float:
    """CPU seconds of 10,000 turns of a plain loop, the minimum of several runs; about half a millisecond in 2026."""
    table, best = dict.fromkeys(range(256), 0), 1.0
    for _ in range(tries):
        begin = time.process_time()
        for turn in range(10_000):
            table[turn & 255] = turn
        best = min(best, time.process_time() - begin)
    return best


def cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU cores that this process may use: the smaller of its affinity and the quota of its cgroup."""
    return min(float(len(os.sched_getaffinity(0))), _quota(root))


def _quota(root: Path) -> float:
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            words = (root / name).read_text().split()
            period = words[1] if len(words) > 1 else (root / "cpu/cpu.cfs_period_us").read_text()
            if words[0] not in ("max", "-1"):
                return int(words[0]) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf


def workers() -> int:
    """Workers of `make test`: two per core, because most tests wait for processes; at least two."""
    return max(2, min(16, int(cores() * 2)))


class _Witness:
    """A process that only sleeps: where it oversleeps, the machine stood still, whatever the tests do."""

    def __init__(self) -> None:
        words = [sys.executable, "-I", "-S", "-c", WITNESS]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._said: IO[bytes] = self._process.stdout
        os.set_blocking(self._said.fileno(), False)
        self._rest = b""
        self._pauses: list[tuple[float, float]] = []
        atexit.register(self.close)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._said.close()
        self._process.wait()

    def pauses(self) -> list[tuple[float, float]]:
        """Begin and end of each pause so far, on the monotonic clock."""
        try:
            lines = (self._rest + os.read(self._said.fileno(), 1 << 16)).split(b"\n")
        except (BlockingIOError, ValueError):  # nothing new, or closed
            return self._pauses
        self._rest = lines.pop()
        for line in lines:
            begin, end = line.split()
            self._pauses.append((float(begin), float(end)))
        return self._pauses


@functools.cache
def _witness() -> _Witness:
    return _Witness()


def watch() -> None:
    """Start the witness: from now on pauses are known."""
    _witness()


def stood_still(since: float, longer_than_s: float = 0.0) -> float:
    """Seconds since this time of the monotonic clock in which the machine did not run a process that was due.

    Only pauses of at least `longer_than_s` count."""
    pauses = [end - begin for begin, end in _witness().pauses() if end > since]
    return sum(pause for pause in pauses if pause >= longer_than_s)


class _Readings:
    """The slowest of the last measurements."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def slowest(self) -> float:
        now = time.monotonic()
        if not self._taken or now - self._taken[-1][0] > EVERY_S:
            self._taken = [one for one in self._taken if now - one[0] < MEMORY_S]
            self._taken.append((time.monotonic(), _measure()))
        return max(factor for _, factor in self._taken)


def _measure() -> float:
    began, cpu = time.monotonic(), time.thread_time()
    speed = python_s(4) / NOMINAL_S
    share = (time.monotonic() - began) / max(1e-6, time.thread_time() - cpu)  # wall time per CPU time
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    fewer = NOMINAL_CORES / min(NOMINAL_CORES, cores())
    return min(MOST, max(1.0, speed) * max(1.0, share, crowd) * fewer)


_readings = _Readings()


def slowness() -> float:
    """How many times longer work takes than on an idle machine of two cores: at least 1, at most MOST."""
    return _readings.slowest()


def _longest_pause() -> float:
    since = time.monotonic() - 5 * MEMORY_S
    return max((end - begin for begin, end in _witness().pauses() if end > since), default=0.0)


def patience(seconds: float, longest_s: float = LONGEST_S) -> float:
    """The bound of a hang, in seconds, at most `longest_s`: a passing test never waits for so long."""
    return min(longest_s, GUARD * (seconds * slowness() + _longest_pause()))


def paced(seconds: float) -> float:
    """A time-out of the product, in seconds, that tests wait for: longer than the longest pause of late."""
    return seconds * slowness() + _longest_pause()


def paced_ms(milliseconds: float) -> int:
    """Return the same as an integer of milliseconds."""
    return math.ceil(1000 * paced(milliseconds / 1000))


class Patience:
    """The bound of a loop that polls.  A turn counts for at most a second: the machine may have stood still."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._left = self._total = patience(seconds)
        self._last = time.monotonic()

    def lasts(self) -> bool:
        """Call once per turn: whether to poll again."""
        now = time.monotonic()
        self._left -= min(STEP_S, now - self._last)
        self._last = now
        return self._left > 0

    def __str__(self) -> str:
        return f"{self._total:.0f} s"


def wait_until(
    holds: Callable[[], object],
    seconds: float = 60.0,
    *,
    poll_s: float = POLL_S,
    why: Callable[[], object] = lambda: "",
) -> None:
    """Return as soon as `holds()` is true.  Fails with `why()` after patience(seconds) of the machine's own time."""
    bound = Patience(seconds)
    while not holds():
        assert bound.lasts(), f"not true after {bound}: {why()}"
        time.sleep(poll_s)


async def until(
    holds: Callable[[], object],
    seconds: float = 60.0,
    *,
    poll_s: float = POLL_S,
    why: Callable[[], object] = lambda: "",
) -> None:
    """Let the event loop run until `holds()` is true, as wait_until() does."""
    bound = Patience(seconds)
    while not holds():
        assert bound.lasts(), f"not true after {bound}: {why()}"
        await asyncio.sleep(poll_s)
