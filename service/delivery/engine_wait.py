"""Requests that arrive while no engine takes requests wait here until an engine does; then they join a lane.

    arrival --> engine takes requests? -- yes --> limits, admission, lane
                  no: wait, at most --takeover-wait-s, the request's timeout and X-Max-Queue-Wait --> 503 no_engine

A request can be checked only against an engine's limits (such as its context length), so none is queued in Redis
before an engine is known.  A request that waits here exists only as a task of this gateway: if its client leaves, Redis
has nothing to remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from quire.service.common.refusal import limit_refusal

RETRY_S = 5.0  # Retry-After in seconds for requests refused because too many wait already


class EngineWait:
    """The requests of this gateway that wait for an engine."""

    def __init__(self, longest_s: float, most: int) -> None:
        """`longest_s`: maximum wait of a request in seconds.  `most`: maximum number of waiting requests."""
        self._longest_s, self._most = longest_s, most
        self._serving = asyncio.Event()  # set while an engine takes new requests
        self._since: dict[object, float] = {}  # arrival time of each waiting request, in order of arrival

    def record(self, *, serving: bool) -> None:
        """Store whether an engine takes new requests; if so, the waiting requests continue, in order of arrival."""
        if serving:
            self._serving.set()
        else:
            self._serving.clear()

    async def wait(self, longest_s: float) -> float:
        """Wait until an engine takes requests, `longest_s` seconds at most; return the seconds waited.

        Raises Refusal if too many requests wait."""
        if self._serving.is_set() or (left_s := min(self._longest_s, longest_s)) <= 0:
            return 0.0
        if len(self) >= self._most:
            message = f"the queue is full: {len(self)} requests wait for an engine"
            raise limit_refusal("queued", message, self._most, retry_after_s=RETRY_S)
        began, entry = time.monotonic(), object()
        self._since[entry] = began
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._serving.wait()
        finally:
            del self._since[entry]
        return time.monotonic() - began

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Seconds since the longest-waiting request arrived; 0 if none waits."""
        return time.monotonic() - next(iter(self._since.values())) if self._since else 0.0
