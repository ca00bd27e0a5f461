"""Sends clients the queue positions of their waiting requests.

    Redis --places(), one batched read every UPDATE_S--> QueueUpdates --> Waiting of each open request
                                                                            |-> headers x-queue-*
                                                                            '-> comments in a stream, if it is late

A late stream begins at once, so its client and every proxy on the way know that it is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.records import Fleet, Lane, Place
from quire.service.delivery import admission

UPDATE_S = 3.0  # between two readings of the places of waiting requests


class Waiting:
    """Position of one client's request in the queue, as last read.  Its first prompt stands for all of them."""

    __slots__ = ("ahead", "lane", "since", "wait_s", "waited_s")

    def __init__(self, lane: Lane, ahead: int, wait_s: float | None) -> None:
        """`ahead`: requests that are served before.  `wait_s`: estimated seconds; None: not known."""
        self.lane, self.ahead, self.wait_s = lane, ahead, wait_s
        self.since = asyncio.get_running_loop().time()
        self.waited_s: float | None = None  # seconds until the first token; None: no token has arrived

    def end(self) -> None:
        """Record that the first token has arrived."""
        if self.waited_s is None:
            self.waited_s = asyncio.get_running_loop().time() - self.since

    def comment(self) -> bytes:
        """Return a line for the stream of a request that still waits."""
        estimate = f" wait_s={self.wait_s:.1f}" if self.wait_s is not None else ""
        return f": queued place={self.ahead}{estimate}\n".encode()

    def headers(self) -> dict[str, str]:
        """Return the headers x-queue-*: place and estimated wait while it waits, afterwards how long it waited."""
        found: dict[str, str] = {"x-queue-lane": self.lane}
        if self.waited_s is not None:
            return found | {"x-queue-wait": f"{self.waited_s:.3f}"}
        found["x-queue-place"] = str(self.ahead)
        return found | ({"x-queue-wait": f"{self.wait_s:.3f}"} if self.wait_s is not None else {})

    def describe(self) -> str:
        """Return the end of a sentence about a request that ended before its first token; else ""."""
        if self.waited_s is not None:
            return ""
        waited_s = asyncio.get_running_loop().time() - self.since
        return f"; it waited {waited_s:.1f} s in the queue, {self.ahead} requests ahead of it"


class Waiter(Protocol):
    """An open request, as far as the updates need it."""

    waiting: Waiting | None

    def announce(self) -> None:
        """Wake the request's handler, which sends a comment."""


class QueueUpdates:
    """Keeps `Waiting` of every request true that no engine has claimed."""

    def __init__(self, bus: GatewaySide, fleet: Callable[[], Fleet]) -> None:
        self._bus, self._fleet = bus, fleet
        self._waiters: dict[str, Waiter] = {}  # waiters by the id of the first prompt
        self._read = 0.0  # when the places were last read, in the event loop's time

    def add(self, order_id: str, waiter: Waiter) -> None:
        """Follow a request that was just queued."""
        self._waiters[order_id] = waiter

    def discard(self, order_id: str) -> None:
        """Follow a request no longer: an engine has claimed it, or it is over."""
        self._waiters.pop(order_id, None)

    async def refresh(self, now_ms: int) -> None:
        """Read the places, at most once every UPDATE_S.  Keeps the last ones while Redis does not answer.

        `now_ms`: unix time on the clock of the fleet's readings."""
        now = asyncio.get_running_loop().time()
        if not self._waiters or now - self._read < UPDATE_S:
            return
        self._read = now
        asked = list(self._waiters)
        try:
            places = await self._bus.places(asked)
        except BusDown:  # the reading of the fleet reports it
            return
        wait_s = admission.wait_estimator(self._fleet(), now_ms)
        for order_id in asked:
            self._update(order_id, places.get(order_id), wait_s)

    def _update(self, order_id: str, place: Place | None, wait_s: Callable[[Place], float | None]) -> None:
        waiter = self._waiters.get(order_id)
        if waiter is None or waiter.waiting is None:
            return
        if place is None:  # claimed: its first token follows
            self.discard(order_id)
            return
        waiter.waiting.lane, waiter.waiting.ahead = place.lane, place.ahead
        waiter.waiting.wait_s = wait_s(place)
        if place.lane == "late":
            waiter.announce()
