"""An estimate of Redis' clock in each process, so that all processes share one time base.

    gateway:  deadline = redis_ms() + timeout  ---- Redis time ---->  engine:  local_ms(deadline), then its own clock

A process has a monotonic clock (`steady_ms`), and estimates its offset to Redis' clock from replies with Redis' TIME:

    sent ------------- TIME ------------- received      the offset is known to within half the round trip
    |<------------- round trip ------------->|

Of the last SAMPLES samples, the one with the shortest round trip is used.  If a new sample contradicts it, Redis' clock
was set or another server answers, so older samples are dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("quire.bus")

SAMPLES = 32
SLACK_MS = 20.0  # tolerated contradiction between two samples, since both clocks drift
ALARM_S = 1.0  # a larger difference between this machine's clock and Redis' clock is logged

_STARTED_MS = time.time() * 1000 - time.monotonic() * 1000


def steady_ms() -> int:
    """Return unix time in ms by this process's monotonic clock: it does not jump when the machine's clock is set."""
    return int(_STARTED_MS + time.monotonic() * 1000)


class RedisClock:
    """Redis' unix time, as estimated in this process; before the first sample, this process's own time."""

    def __init__(self, steady: Callable[[], float] | None = None, wall: Callable[[], float] = time.time) -> None:
        """`steady`: a monotonic clock in ms.  `wall`: this machine's unix time in seconds, only for `skew_s`."""
        self._steady = steady or (lambda: _STARTED_MS + time.monotonic() * 1000)
        self._wall = wall
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # (round trip, offset), ms
        self._offset_ms = 0.0
        self._alarmed = False

    def ticks(self) -> float:
        """Return the current time by `steady`, ms: take it before a command, and pass it to sample() afterwards."""
        return self._steady()

    def sample(self, sent: float, redis_ms: int) -> None:
        """Add a sample from a reply that has just arrived.  `sent`: ticks() before the command; `redis_ms`: TIME."""
        received = self._steady()
        trip, offset = received - sent, redis_ms + 0.5 - (sent + received) / 2
        if self._samples:
            best_trip, best = min(self._samples)
            if abs(offset - best) > (trip + best_trip) / 2 + SLACK_MS:
                self._samples.clear()
        self._samples.append((trip, offset))
        _, self._offset_ms = min(self._samples)
        self._alarm()

    def redis_ms(self) -> int:
        """Return the current unix time in ms by Redis' clock."""
        return int(self._steady() + self._offset_ms)

    def local_ms(self, redis_ms: int) -> int:
        """Convert a time on Redis' clock to a time on this process's clock (steady_ms)."""
        return int(redis_ms - self._offset_ms)

    @property
    def skew_s(self) -> float:
        """Seconds by which this machine's clock is ahead of Redis' clock; 0 before the first sample."""
        if not self._samples:
            return 0.0
        return self._wall() - (self._steady() + self._offset_ms) / 1000

    def _alarm(self) -> None:
        skew = self.skew_s
        wrong = abs(skew) > ALARM_S
        if wrong and not self._alarmed:
            log.warning(
                "this machine's clock is %.1f s %s Redis' clock; deadlines follow Redis: check NTP on both",
                abs(skew),
                "ahead of" if skew > 0 else "behind",
            )
        self._alarmed = wrong
