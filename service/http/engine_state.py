"""GET /engine/state: a live stream of block pools and load of all engines.  Its clients are called watchers.

    Redis, FleetView --EngineStateFeed, 5 times per second--> newest FleetState --> each watcher: changes only

One reader task serves all watchers.  Without a watcher it does not run, and engines publish no pool state.  A watcher
gets the newest state once its socket has taken the previous event.  So a slow watcher skips states and delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator

from aiohttp import web

from quire.engine.wire.link import BusDown
from quire.service.common.limits import WATCHERS
from quire.service.common.refusal import Refusal, limit_refusal
from quire.service.delivery.streams import Streams
from quire.service.http import sse
from quire.service.http.middleware import TENANT
from quire.service.http.state_events import FleetState, event, observe

log = logging.getLogger("quire.gateway")

PERIOD_S = 0.2  # minimum seconds between two events
KEEP_S = 1.0  # maximum seconds between two events or comments; also between two renewals of the `watch` key in Redis
BYTES_PER_S = 16_000  # maximum mean rate of one watcher's events
BURST_BYTES = 64_000  # maximum bytes for one watcher at once
SLOWEST_S = 30.0  # seconds that a watcher has to read its socket's buffer before its connection is closed
RETRY_S = 5.0  # Retry-After in seconds for watchers beyond the limit
KEEP_ALIVE = b": keep-alive\n\n"


class ByteBudget:
    """A token bucket for the bytes of one watcher's events: BURST_BYTES, refilled at BYTES_PER_S."""

    def __init__(self, now: float) -> None:
        """`now`: present time in seconds, on the same clock as in `spend`."""
        self._left, self._at = float(BURST_BYTES), now

    def spend(self, size: int, now: float) -> float:
        """Take an event's bytes from the bucket.  Returns the seconds until the next event may be sent."""
        self._left = min(BURST_BYTES, self._left + (now - self._at) * BYTES_PER_S) - size
        self._at = now
        return max(PERIOD_S, -self._left / BYTES_PER_S)


class EngineStateFeed:
    """The newest state of the engines, and the clients that watch it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._watchers = 0
        self._reader: asyncio.Task[None] | None = None  # runs while there are watchers
        self._state: FleetState | None = None  # newest state; None: no state was read yet
        self._failed_at = 0.0  # event-loop time of the first failed read since the last success; 0: no failure
        self._encoded: dict[FleetState | None, bytes] = {}  # previous state -> event: changes to the newest
        self._news = asyncio.Event()  # set by each reading, and then replaced by a new event
        self._closing = asyncio.Event()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /engine/state.  Raises Refusal: 403 without the admin scope, 429 beyond WATCHERS, 503 at a drain."""
        request[TENANT].require_admin()
        if self._closing.is_set():
            raise Refusal(503, "shutting_down", "this gateway is shutting down", retry_after_s=1.0)
        with self._watching():
            response = await sse.begin(request)
            async with contextlib.aclosing(self._events()) as events:
                async for data in events:
                    try:
                        async with asyncio.timeout(SLOWEST_S):
                            await response.write(data)
                            await request.writer.drain()  # aiohttp by itself waits only after every 64 KiB
                    except TimeoutError:
                        raise ConnectionResetError("client does not read") from None
            await response.write_eof()
        return response

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._closing.set()
        self._news.set()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A context in which the engines' state is read.  Raises Refusal(429)."""
        if self._watchers >= WATCHERS:
            message = f"{WATCHERS} clients watch the engines at this gateway already"
            raise limit_refusal("watchers", message, WATCHERS, retry_after_s=RETRY_S)
        self._watchers += 1
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="the reader of the engines' state")
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._reader.cancel()
                self._reader, self._state, self._failed_at = None, None, 0.0
                self._encoded.clear()

    # -- the reader

    async def _read(self) -> None:
        streams, clock = self._streams, asyncio.get_running_loop().time
        renew_at = 0.0
        while True:
            now = clock()
            try:
                if now >= renew_at:
                    await streams.pool_states.watch()
                    renew_at = now + KEEP_S
                fleet = streams.fleet
                pools = await streams.pool_states.read([load.engine for load in fleet.engines])
                self._publish(observe(fleet, pools, streams.redis_ms()))
            except Exception as error:
                renew_at = 0.0
                if not self._failed_at:
                    log.warning("cannot read the state of the engines, trying again: %s", error, exc_info=_bug(error))
                    self._failed_at = now
            await asyncio.sleep(PERIOD_S)

    def _publish(self, state: FleetState) -> None:
        self._state, self._failed_at = state, 0.0
        self._encoded.clear()
        self._news.set()
        self._news = asyncio.Event()

    # -- one watcher

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield events and comments until close()."""
        clock = asyncio.get_running_loop().time
        sent: FleetState | None = None  # state that the watcher has
        seen: FleetState | None = None  # last state that was compared with `sent`
        due = 0.0  # time at which an event is sent even without changes
        budget = ByteBudget(clock())
        while not self._closing.is_set():
            newest = await self._newer(seen)
            if newest is None:
                yield self._comment(clock())
                continue
            seen = newest
            if sent is not None and clock() < due and newest.equals(sent):
                continue
            data = self._event(sent, newest)
            yield data
            sent, due = newest, clock() + KEEP_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget.spend(len(data), clock())):
                    await self._closing.wait()

    async def _newer(self, seen: FleetState | None) -> FleetState | None:
        """Wait for a state newer than `seen`.  Returns None if none arrives within KEEP_S, or after close()."""
        try:
            async with asyncio.timeout(KEEP_S):
                while self._state is None or self._state is seen:
                    await self._news.wait()
                    if self._closing.is_set():
                        return None
        except TimeoutError:
            return None
        return self._state

    def _event(self, before: FleetState | None, state: FleetState) -> bytes:
        """Return the event that changes `before` to the newest state, encoded once per `before`."""
        if before not in self._encoded:
            self._encoded[before] = event(before, state)
        return self._encoded[before]

    def _comment(self, now: float) -> bytes:
        """Return a keep-alive comment; while Redis is away, it contains the age of the state."""
        if not self._failed_at:
            return KEEP_ALIVE
        return b": redis is away, the state is %d s old\n\n" % max(0, now - self._failed_at)


def _bug(error: Exception) -> Exception | None:
    """Return the error if its traceback shall be logged: any error but BusDown."""
    return None if isinstance(error, BusDown) else error
