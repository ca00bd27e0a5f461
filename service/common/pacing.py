"""Keep the gateway's event loop responsive: bound the work of one turn, and measure how late turns are.

Streams end together: a load balancer stops, a deadline is common, the gateway drains.  Each handler then has a few
tenths of a millisecond of work.  asyncio would run all handlers in one turn, in which no token moves.

    sockets  --at most TURN_EVENTS a turn-->  handlers cancelled by clients that left
    timers, token batches  --Pacer, at most TURN_CALLS a turn-->  deadlines, handlers woken
    stored answers, slow readers  --Pacer.slice, SLICE_S a turn--> tokens decoded, events built

Python's garbage collector stops the loop as well.  A full collection visits every connection and its request, which
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

TURN_CALLS = 32  # handlers woken in one turn of the loop
TURN_EVENTS = 32  # sockets handled in one turn
SLICE_S = 0.002  # longest slice of one request's work before other requests run
CLOCK_S = 1e-6  # the event loop may run a timer this much early
WATCH_S = 0.01  # between two measurements
# Thresholds of the garbage collector.  The first: how many new objects start a collection of the young generation (5 to
# 15 ms).  The last: after how many of those a full one runs even while many connections are open.  It bounds the memory
# of cyclic garbage.  Requests make nearly none: reference counts free them.
GC_THRESHOLDS = (10_000, 1, 500)
QUIET_CONNECTIONS = 200  # with this many a full collection takes about 10 ms
QUIET_S = 5.0  # between two checks whether a full collection is due and connections are few


class Timer:
    """A scheduled callback."""

    __slots__ = ("_pacer", "args", "callback")

    def __init__(self, pacer: Pacer, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._pacer = pacer
        self.callback: Callable[..., None] | None = callback
        self.args = args

    def cancel(self) -> None:
        """Drop the callback.  Does nothing if it has run."""
        if self.callback is not None:
            self.callback, self.args = None, ()
            self._pacer.forget_one()


class Pacer:
    """Runs callbacks in order: at once while fewer than TURN_CALLS ran in this turn of the loop, else in later turns.

    A callback of call_soon() may run when its reason no longer holds, so it must check."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, Timer]] = []  # heap ordered by due time, on the event loop's clock
        self._numbers = itertools.count()
        self._cancelled = 0  # timers in the heap
        self._handle: asyncio.Handle | None = None  # handle of the first timer
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._left = TURN_CALLS  # calls left in this turn
        self._armed = False
        self._slices: deque[asyncio.Future[None]] = deque()  # long works, in the order of their requests
        self._slicing = False

    async def slice(self) -> float:
        """Wait until long work may continue; return the loop's time at which its slice is over.

        One slice runs in a turn of the loop, whatever the number of requests with such work."""
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
            if not (ready := self._slices.popleft()).done():  # else its request was cancelled
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
        """Run the callback once the event loop's time is `when`.  Of timers due together, TURN_CALLS run in a turn.

        asyncio's own timers all run in the turn in which they are due."""
        timer = Timer(self, callback, args)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if self._timers[0][2] is timer:
            self._arm()
        return timer

    def forget_one(self) -> None:
        """Count a cancelled timer.  Cancelled timers leave the heap in bulk."""
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
            self._disarm()  # a callback may have set a timer
            if self._timers and not left:
                self._handle = loop.call_soon(self._due)
            elif self._timers:
                self._arm()

    def _turn(self) -> None:
        self._left = TURN_CALLS
        self._armed = bool(self._waiting)
        if self._armed:  # armed first, so that a callback that raises stops no other
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
    """Divides one handler's work that has no waits of its own: call pause() again and again."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._time = pacer, asyncio.get_running_loop().time
        self._until = self._time() + SLICE_S

    async def pause(self) -> None:
        """Let other requests run if this one has computed for SLICE_S."""
        if self._time() >= self._until:
            self._until = await self._pacer.slice()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that handles TURN_EVENTS sockets a turn, where the system has epoll."""
    selector = selectors.DefaultSelector()
    if hasattr(selectors, "EpollSelector") and isinstance(selector, selectors.EpollSelector):
        selector._selector = _FewEvents(selector._selector)  # type: ignore[attr-defined]
    return asyncio.SelectorEventLoop(selector)


class StallWatch:
    """Measures every WATCH_S how late the event loop runs a timer."""

    def __init__(self, record: Callable[[float, float], None]) -> None:
        """`record(late_s, busy_s)`: how late the timer ran, and how much of that time this process computed.

        Other processes took the rest."""
        self._record = record
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to measure.  Needs a running event loop."""
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
        """`connections()` returns how many are open."""
        self._connections = connections
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to check.  Needs a running event loop."""
        self._handle = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        self.start()
        if gc.get_count()[2] and self._connections() <= QUIET_CONNECTIONS:
            gc.collect()
