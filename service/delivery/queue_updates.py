"""Sends clients the queue positions of their waiting requests.

    Redis --places(), one batched read every UPDATE_S--> QueueUpdates --> Waiting of each open request
                                                                            |-> headers x-queue-*
                                                                            '-> SSE comments, in the late lane

The late lane has the requests whose estimated wait exceeds the TTFT target (`admission.py`). A streaming response
begins as soon as its request waits in that lane, before the first token, so that the client and every proxy on the way
know that the request is being served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.records import Fleet, Lane, Place
from quire.service.delivery import admission

UPDATE_S = 3.0  # seconds between two reads of the queue positions
BATCH = 1000  # requests whose queue positions are read and updated in one turn of the event loop: 2 ms


class Waiting:
    """Last known position of one client's request in the queue: the position of its first prompt."""

    __slots__ = ("ahead", "lane", "since", "wait_s", "waited_s")

    def __init__(self, lane: Lane, ahead: int, wait_s: float | None) -> None:
        """`ahead`: number of requests ahead of it.  `wait_s`: estimated wait in seconds; None: not known."""
        self.lane, self.ahead, self.wait_s = lane, ahead, wait_s
        self.since = asyncio.get_running_loop().time()
        self.waited_s: float | None = None  # seconds until the first token; None: no token has arrived

    def end(self) -> None:
        """Record that the first token has arrived."""
        if self.waited_s is None:
            self.waited_s = asyncio.get_running_loop().time() - self.since

    def comment(self) -> bytes:
        """Return an SSE comment with the request's queue position and its estimated wait."""
        estimate = f" wait_s={self.wait_s:.1f}" if self.wait_s is not None else ""
        return f": queued place={self.ahead}{estimate}\n".encode()

    def headers(self) -> dict[str, str]:
        """Return the x-queue-* headers: position and estimated wait, or after the first token the actual wait."""
        found: dict[str, str] = {"x-queue-lane": self.lane}
        if self.waited_s is not None:
            return found | {"x-queue-wait": f"{self.waited_s:.3f}"}
        found["x-queue-place"] = str(self.ahead)
        return found | ({"x-queue-wait": f"{self.wait_s:.3f}"} if self.wait_s is not None else {})

    def describe(self) -> str:
        """Return the suffix of an error message: how long the request waited.  "" if its first token had arrived."""
        if self.waited_s is not None:
            return ""
        waited_s = asyncio.get_running_loop().time() - self.since
        return f"; it waited {waited_s:.1f} s in the queue, {self.ahead} requests ahead of it"


class Waiter(Protocol):
    """The attributes of an open request that QueueUpdates uses."""

    waiting: Waiting | None

    def announce(self) -> None:
        """Wake the request's handler, which then sends an SSE comment."""


class QueueUpdates:
    """Keeps the `Waiting` of every request up to date until an engine claims the request."""

    def __init__(self, bus: GatewaySide, fleet: Callable[[], Fleet]) -> None:
        self._bus, self._fleet = bus, fleet
        self._waiters: dict[str, Waiter] = {}  # waiters by the id of the first prompt
        self._read = 0.0  # when the queue positions were last read, in the event loop's time

    def add(self, submission_id: str, waiter: Waiter) -> None:
        """Follow a request that was just queued."""
        self._waiters[submission_id] = waiter

    def discard(self, submission_id: str) -> None:
        """Stop following a request: an engine has claimed it, or it has ended."""
        self._waiters.pop(submission_id, None)

    async def refresh(self, now_ms: int) -> None:
        """Read the queue positions, at most once every UPDATE_S.  While Redis does not answer, the last ones stay.

        `now_ms`: unix time on the clock of the fleet's snapshots."""
        now = asyncio.get_running_loop().time()
        if not self._waiters or now - self._read < UPDATE_S:
            return
        self._read = now
        waiting = list(self._waiters)
        wait_s = admission.wait_estimator(self._fleet(), now_ms)
        for at in range(0, len(waiting), BATCH):  # other requests run while Redis answers
            batch = waiting[at : at + BATCH]
            try:
                places = await self._bus.places(batch)
            except BusDown:  # FleetWatch, which also reads Redis, reports the failure
                return
            for submission_id in batch:
                self._update(submission_id, places.get(submission_id), wait_s)

    def _update(self, submission_id: str, place: Place | None, wait_s: Callable[[Place], float | None]) -> None:
        waiter = self._waiters.get(submission_id)
        if waiter is None or waiter.waiting is None:
            return
        if place is None:  # claimed: its first token follows
            self.discard(submission_id)
            return
        waiter.waiting.lane, waiter.waiting.ahead = place.lane, place.ahead
        waiter.waiting.wait_s = wait_s(place)
        if place.lane == "late":
            waiter.announce()
