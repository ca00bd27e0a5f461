"""Keeps the gateway's event loop responsive: limits the work of one turn, and measures how late turns are.

Many streams may end at once: a load balancer stops, requests share a deadline, the gateway drains.  Each handler then
has a few tenths of a millisecond of work.  asyncio would run all handlers in one turn, during which no stream gets
tokens.

    sockets  --at most TURN_EVENTS per turn-->  handlers cancelled by clients that left
    timers, token batches  --Pacer, at most TURN_CALLS per turn-->  deadlines, handlers woken
    stored answers, slow readers  --Pacer.slice, SLICE_S per turn--> tokens decoded, events built

Python's garbage collector also blocks the loop.  A full collection visits every connection and its request, which
takes 1.1 s at 16,000 connections.  So full collections wait until few connections are open.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

TURN_CALLS = 32  # maximum handlers woken in one turn of the event loop
TURN_EVENTS = 32  # maximum sockets handled in one turn
SLICE_S = 0.002  # seconds of one request's work before other requests run
CLOCK_S = 1e-6  # the event loop may run a timer this many seconds early
WATCH_S = 0.01  # seconds between two measurements of a StallWatch
# Thresholds of the garbage collector.  The first one: number of new objects that starts a collection of the young
# generation (5 to 15 ms).  The last one: number of such collections after which a full collection runs even while many
# connections are open, which bounds the memory of cyclic garbage.  Requests create nearly no cycles.
GC_THRESHOLDS = (10_000, 1, 500)
QUIET_CONNECTIONS = 200  # with at most this many connections a full collection takes about 10 ms
QUIET_S = 5.0  # seconds between two checks of a QuietCollector


class Timer:
    """A scheduled callback."""

    __slots__ = ("_pacer", "args", "callback")

    def __init__(self, pacer: Pacer, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._pacer = pacer
        self.callback: Callable[..., None] | None = callback
        self.args = args

    def cancel(self) -> None:
        """Drop the callback.  Does nothing if the callback has run."""
        if self.callback is not None:
            self.callback, self.args = None, ()
            self._pacer.forget_one()


class Pacer:
    """Runs callbacks in order: at once if fewer than TURN_CALLS ran in this turn of the loop, else in later turns.

    A callback of call_soon() may run late, so it must check whether its reason still holds."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, Timer]] = []  # heap ordered by due time, on the event loop's clock
        self._numbers = itertools.count()
        self._cancelled = 0  # number of cancelled timers in the heap
        self._handle: asyncio.Handle | None = None  # asyncio's timer for the first timer of the heap
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._left = TURN_CALLS  # calls left in this turn
        self._armed = False
        self._slices: deque[asyncio.Future[None]] = deque()  # handlers that wait for a slice, in order
        self._slicing = False

    async def slice(self) -> float:
        """Wait until long work may continue.  Returns the loop's time at which its slice ends.

        Only one slice runs per turn of the loop, however many requests have long work."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        self._slices.append(ready)
        if not self._slicing:
            self._slicing = True
            loop.call_soon(self._next_slice)
        await ready
        return loop.time() + SLICE_S

    def _next_slice(self) -> None:
        while self._slices:
            if not (ready := self._slices.popleft()).done():  # done: its request was cancelled
                ready.set_result(None)
                asyncio.get_running_loop().call_soon(self._next_slice)
                return
        self._slicing = False

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Run the callback now, or in a later turn.  Needs a running event loop."""
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            callback(*args)
        else:
            self._waiting.append((callback, args))

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> Timer:
        """Run the callback at the event loop's time `when`.

        If many timers are due, TURN_CALLS run per turn; asyncio would run all of them in one turn."""
        timer = Timer(self, callback, args)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if self._timers[0][2] is timer:
            self._arm()
        return timer

    def forget_one(self) -> None:
        """Count a cancelled timer.  Cancelled timers are removed from the heap in bulk."""
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        self._disarm()
        self._handle = asyncio.get_running_loop().call_at(self._timers[0][0], self._due)

    def _due(self) -> None:
        loop, left = asyncio.get_running_loop(), TURN_CALLS
        self._handle = None
        now = loop.time() + CLOCK_S
        try:
            while left and self._timers and self._timers[0][0] <= now:
                _, _, timer = heapq.heappop(self._timers)
                if (callback := timer.callback) is None:
                    self._cancelled -= 1
                else:
                    left -= 1
                    timer.callback = None
                    callback(*timer.args)
        finally:
            self._disarm()  # a callback may have armed the timer
            if self._timers and not left:
                self._handle = loop.call_soon(self._due)
            elif self._timers:
                self._arm()

    def _turn(self) -> None:
        self._left = TURN_CALLS
        self._armed = bool(self._waiting)
        if self._armed:  # before the callbacks run, so that an exception in one does not stop the others
            asyncio.get_running_loop().call_soon(self._turn)
        while self._waiting and self._left:
            self._left -= 1
            callback, args = self._waiting.popleft()
            callback(*args)


class _FewEvents:
    """An epoll object that reports at most TURN_EVENTS sockets; the kernel reports the others at the next call."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def poll(self, timeout: float, maxevents: int) -> Any:
        return self._epoll.poll(timeout, min(maxevents, TURN_EVENTS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


class Turns:
    """Divides long work of one handler into slices: the handler calls pause() between steps."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._time = pacer, asyncio.get_running_loop().time
        self._until = self._time() + SLICE_S

    async def pause(self) -> None:
        """Let other requests run if this one has computed for SLICE_S."""
        if self._time() >= self._until:
            self._until = await self._pacer.slice()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that handles at most TURN_EVENTS sockets per turn, if the system has epoll."""
    selector = selectors.DefaultSelector()
    if hasattr(selectors, "EpollSelector") and isinstance(selector, selectors.EpollSelector):
        selector._selector = _FewEvents(selector._selector)  # type: ignore[attr-defined]
    return asyncio.SelectorEventLoop(selector)


class StallWatch:
    """Measures every WATCH_S how late the event loop runs a timer."""

    def __init__(self, record: Callable[[float, float], None]) -> None:
        """`record(late_s, busy_s)`: gets the timer's delay, and the CPU time of this process within the delay."""
        self._record = record
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the measurements.  Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        self._due, self._busy = self._loop.time() + WATCH_S, time.process_time()
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = max(0.0, self._loop.time() - self._due)
        self._record(late, min(late, time.process_time() - self._busy))
        self._arm()


class QuietCollector:
    """Runs a full garbage collection when few connections are open and the oldest generation has grown."""

    def __init__(self, connections: Callable[[], int]) -> None:
        """`connections()` returns the number of open connections."""
        self._connections = connections
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the checks.  Needs a running event loop."""
        self._handle = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        self.start()
        if gc.get_count()[2] and self._connections() <= QUIET_CONNECTIONS:
            gc.collect()
